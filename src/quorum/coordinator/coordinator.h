#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/rpc/endpoint.h>

#include "quorum/coordinator/messages.h"
#include "quorum/rule/generations.h"

namespace torchspan::quorum {

/// Rank 0's tables of generations, one for each trainer, with the calls that wait for their answers; every worker has
/// one, which counts the processes that ended. Thread-safe.
class Coordinator : public std::enable_shared_from_this<Coordinator> {
 public:
  explicit Coordinator(std::weak_ptr<rpc::Endpoint> endpoint) : endpoint_(std::move(endpoint)) {}

  Future<GenerationAnswer> next(int rank, const AwaitGeneration& message);
  void withdraw(int rank, const Withdraw& message);
  /// The process of a rank has ended.
  void departed(int rank, const std::string& why);
  /// How many processes of a rank have ended, as far as this worker knows.
  std::uint64_t departures(int rank) const;
  /// See Generations::is_over_for(). False if no rank has reported to this trainer.
  bool is_over_for(int rank, const std::string& trainer) const;

 private:
  using Call = Promise<GenerationAnswer>;
  using Answer = std::pair<std::shared_ptr<Call>, GenerationAnswer>;
  struct Trainer {
    std::unique_ptr<Generations> table;
    std::map<int, std::shared_ptr<Call>> calls;  ///< by rank: its latest
  };

  std::shared_ptr<rpc::Endpoint> endpoint() const;
  Trainer& trainer(const std::string& name, rpc::Endpoint& endpoint) TORCHSPAN_REQUIRES(mutex_);
  void answer(const std::string& name, int rank, GenerationAnswer answer) TORCHSPAN_REQUIRES(mutex_);
  /// Completes the calls that the tables have answered, and arranges the next tick.
  void settle(rpc::Endpoint& endpoint);
  void tick();

  const std::weak_ptr<rpc::Endpoint> endpoint_;
  mutable Mutex mutex_;
  std::map<std::string, Trainer> trainers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Answer> answers_ TORCHSPAN_GUARDED_BY(mutex_);
  Deadline tick_at_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<int, std::uint64_t> departures_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by rank
};

}  // namespace torchspan::quorum
