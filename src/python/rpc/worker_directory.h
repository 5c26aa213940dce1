#pragma once
#include <deque>
#include <string>
#include <vector>

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/rendezvous/membership.h>

namespace torchspan::python {

using TorchWorker = torch::distributed::rpc::WorkerInfo;

/// The members of a world as torch's WorkerInfo, which stay where they are. Thread-safe.
class WorkerDirectory {
 public:
  explicit WorkerDirectory(TorchWorker self) : self_(std::move(self)) {}

  /// Before everything else. `membership` must live as long as calls are made.
  void begin(const rendezvous::Membership& membership) { membership_ = &membership; }
  /// Throws std::runtime_error that lists the workers.
  const TorchWorker& find(const std::string& name) const;
  const TorchWorker& find(torch::distributed::rpc::worker_id_t id) const;
  /// Those that have neither died nor left; in a fixed world, all.
  std::vector<TorchWorker> all() const;
  /// The rank of a worker in the membership. torch's id of this worker is another one in a world that it has alone.
  std::uint32_t rank_of(const TorchWorker& worker) const;
  std::string name_of(std::uint32_t rank) const;

 private:
  TorchWorker worker_of(const rendezvous::Member& member) const;
  template <class Matches>
  const TorchWorker& find_if(const Matches& matches, const std::string& what) const;

  const TorchWorker self_;
  const rendezvous::Membership* membership_ = nullptr;
  mutable Mutex mutex_;
  mutable std::deque<TorchWorker> known_ TORCHSPAN_GUARDED_BY(mutex_);  ///< those that were asked for
};

}  // namespace torchspan::python
