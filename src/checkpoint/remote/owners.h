#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/checkpoint/state.h>
#include <torchspan/core/time.h>
#include <torchspan/rpc/worker.h>

#include "checkpoint/commit/save_round.h"

namespace torchspan::checkpoint {

using RemoteValues = std::vector<std::pair<std::string, RemoteValue>>;

/// The caller's side of values on other workers: lists, copies, writes and loads them there. Errors name the
/// worker.
class Owners final : public RemoteFiles {
 public:
  Owners(Worker worker, Duration timeout) : worker_(std::move(worker)), timeout_(timeout) {}
  ~Owners() override;

  /// The tensors of the values, with their owners.
  Listing list(const RemoteValues& values) const;
  /// Makes the owners copy what `rank` lets them write.
  void snapshot(const RemoteValues& values, const SaveJob& job, std::size_t rank);
  /// Drops snapshots that were not written.
  void release() noexcept;
  Future<std::string> write(const Plan::Share& share, const std::string& path) override;
  void load(const std::string& folder, const std::string& name, const RemoteValue& value) const;

 private:
  Deadline deadline() const { return worker_.runtime().executor.deadline_in(timeout_); }
  std::string owner_of(const RemoteValue& value) const;

  const Worker worker_;
  const Duration timeout_;
  std::map<std::string, GlobalId> snapshots_;  ///< by owner
};

}  // namespace torchspan::checkpoint
