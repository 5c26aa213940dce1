#pragma once
#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <torchspan/collective/group.h>
#include <torchspan/detail/core/owner_process.h>
#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "python/job.h"

namespace torchspan::python {

/// The processes of one torch.distributed job: their membership, and the runtime on which their groups run. Thread-safe.
class World {
 public:
  /// Joins; returns when all ranks have joined. Throws Error as Membership::join().
  static std::shared_ptr<World> join(c10d::Store& store, const Place& place, Duration timeout);
  ~World();
  World(const World&) = delete;

  /// Collective over `options.ranks`.
  collective::Group make_group(collective::GroupOptions options);
  rendezvous::Membership& membership() { return *membership_; }
  Runtime& runtime() { return *runtime_; }
  const std::shared_ptr<Runtime>& shared_runtime() const { return runtime_; }
  /// Runs `job` on a thread that may block, as callbacks of c10d's futures do.
  void post(UniqueFunction<void()> job);
  /// Leaves, so that the other ranks see no death. Rank 0 waits for the others until the deadline. Later calls of
  /// groups throw kCancelled. Idempotent.
  void leave(Duration timeout);

 private:
  World(c10d::Store& store, const Place& place, Duration timeout);

  std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<rendezvous::Membership> membership_;
  std::unique_ptr<Observation> observation_;
  std::shared_ptr<Pool> callbacks_;
};

}  // namespace torchspan::python
