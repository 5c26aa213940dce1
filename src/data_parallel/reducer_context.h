#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>

#include "data_parallel/buckets.h"
#include "data_parallel/parameters.h"
#include "data_parallel/passes.h"
#include "data_parallel/streams.h"

namespace torchspan::data_parallel {

/// The count of forwards starts again there.
inline constexpr std::int32_t kForwardsEnd = 1 << 30;
/// Numbers in the status before those of the parameters (round.cpp).
inline constexpr std::size_t kStatusFields = 3;

/// Counts the continuations on a group's threads that use a reducer, so that its destructor can wait for
/// them. Without this, a thread of the group could drop the last handle of the group, which must not happen
/// there. Thread-safe.
class HoldCount {
 public:
  /// Counts as one until its last copy is destroyed.
  using Hold = std::shared_ptr<void>;

  explicit HoldCount(Executor& executor) : executor_(executor) {}
  HoldCount(const HoldCount&) = delete;
  HoldCount& operator=(const HoldCount&) = delete;

  Hold take();
  /// Waits until no hold is left; on one thread at a time.
  void wait();

 private:
  void release();

  Executor& executor_;
  Mutex mutex_;
  std::size_t count_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  Parker* waiter_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
};

/// What a reducer and its rounds share, and the lock of both. Constructing it is collective. The lock is held for
/// moments only: never across tensor work, a launch, a user's hook, a call of Round or a wait.
struct ReducerContext {
  ReducerContext(const Reducer::Replicas& replicas, const collective::Group& parent,
                 DataParallelOptions options);
  ReducerContext(const ReducerContext&) = delete;
  ReducerContext& operator=(const ReducerContext&) = delete;

  /// Writes the buckets to `stats`.
  void note_buckets();
  /// A reduction has failed: gradients that were undefined before it become undefined again.
  void restore_undefined();

  const DataParallelOptions options;
  const collective::Group group;
  Runtime& runtime;
  const ParameterSlots slots;
  const ReductionStream stream;
  SlotHooks hooks;
  HoldCount holds;
  std::atomic<std::uint64_t> rounds{0};  ///< that have begun here

  // These change between rounds, or at the end of one, while nothing else uses them.
  CommHook comm_hook;                ///< empty: an all-reduce
  std::shared_ptr<Buckets> buckets;  ///< first in the reverse order of parameters
  bool keeps_buckets = false;        ///< they follow the order of gradients already, or shall not
  at::Tensor status;                 ///< what ranks exchange at the end of a round, in memory that they share

  mutable Mutex mutex;
  ReducerStats stats TORCHSPAN_GUARDED_BY(mutex);
  std::uint64_t given_up TORCHSPAN_GUARDED_BY(mutex) = 0;      ///< rounds that this rank has given up
  std::int32_t forward_count TORCHSPAN_GUARDED_BY(mutex) = 0;  ///< of reduced forwards
  /// By parameter: it has got a gradient since the last round. Empty: not exchanged.
  std::vector<std::uint8_t> used TORCHSPAN_GUARDED_BY(mutex);
  Forwards forwards TORCHSPAN_GUARDED_BY(mutex);
  UndefinedGradients undefined TORCHSPAN_GUARDED_BY(mutex);
};

}  // namespace torchspan::data_parallel
