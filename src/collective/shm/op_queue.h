#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <optional>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>

#include "collective/shm/shm_algorithms.h"

namespace torchspan::collective::shm {

/// Runs the operations of one rank of a group in the order of their calls. The thread that holds the driver
/// lock runs them: a caller that waits for a future, else the group's thread. The group's thread leaves an
/// operation to its caller for a moment, because waking the thread takes longer than a small operation.
class OpQueue final : public std::enable_shared_from_this<OpQueue> {
 public:
  static std::shared_ptr<OpQueue> make(std::unique_ptr<GroupMemory> memory, Duration timeout);
  /// Fails pending operations with kCancelled.
  ~OpQueue();

  /// Numbers the call, posts it to the other ranks as soon as a slot is free, and later completes the
  /// operation.
  void submit(std::unique_ptr<Operation> operation);
  void abort(const Error& cause);
  /// Why no operation runs any more; nullopt if operations run.
  std::optional<Error> breakage();

  // What PeerMemory reports, without locks, on threads that this object does not join. See WorldListener.
  void rank_departed();
  /// Fails all operations on this rank; the other ranks see that it has left the group.
  void world_ended(const Error& reason);
  void world_closing();

  GroupMemory& memory() { return *memory_; }
  Runtime& runtime() const { return *runtime_; }
  ShmAlgorithms& algorithms() { return algorithms_; }
  Executor& executor() { return executor_; }
  Duration timeout() const { return timeout_; }
  std::weak_ptr<ContinuationExecutor> continuations() const;
  /// As Backend::set_instance().
  void set_instance(std::uint64_t instance);

 private:
  class QueueExecutor;

  OpQueue(std::unique_ptr<GroupMemory> memory, Duration timeout);
  void start();
  void stop_thread();
  void run();
  /// When the group's thread should look again; nullopt if it should take the driver lock now.
  std::optional<Deadline> rest();

  bool take_driver_lock();
  void release_driver_lock();
  /// Runs operations until `done`, until the deadline, or until none is left. The caller holds the driver
  /// lock.
  void drive(const std::atomic<bool>* done, Deadline deadline);
  /// Continues the first operation; true if it is complete, else sets `target` to what it waits for.
  bool advance(Operation& operation, CountTarget& target);
  /// Waits for other ranks; false if this thread should stop driving.
  bool await(Operation& operation, CountTarget target, const std::atomic<bool>* done, Deadline deadline);
  void compare_calls(const Operation& operation);
  void finish_first();
  void fail_all(const Error& cause);
  void post_ready() TORCHSPAN_REQUIRES(mutex_);
  bool has_slot() const TORCHSPAN_REQUIRES(mutex_);
  Operation* first();

  /// Breaks the group if a rank that has not reached the target is gone.
  void break_if_rank_departed(const Operation& operation, CountTarget target);
  void break_for_timeout(const Operation& operation, CountTarget target, Duration waited);
  /// Warns of the ranks for which a barrier or gather of bytes waits, after 10 s, 20 s, 40 s, …; on the first that waits.
  void warn_if_due(Operation& operation, CountTarget target, Duration waited);
  bool is_late(int rank, CountTarget target) const;
  /// "worker1 (…), which made 3 calls so far".
  std::vector<std::string> late_ranks(const Operation& operation, CountTarget target) const;

  const std::shared_ptr<Runtime> runtime_;
  Executor& executor_;
  const Duration timeout_;
  const std::unique_ptr<GroupMemory> memory_;
  Signals& signals_;
  ShmAlgorithms algorithms_;
  std::shared_ptr<QueueExecutor> continuations_;
  const std::unique_ptr<Parker> parker_;
  std::atomic<std::int32_t> group_number_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> rank_departed_{false};
  std::atomic<bool> ended_{false};  ///< end_ is set

  Mutex mutex_;
  std::deque<std::unique_ptr<Operation>> queue_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> failure_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> end_ TORCHSPAN_GUARDED_BY(mutex_);  ///< why the world ended
  std::uint64_t called_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::uint64_t posted_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  bool driving_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool asleep_ TORCHSPAN_GUARDED_BY(mutex_) = false;  ///< the thread sleeps until it is unparked
  TimePoint last_call_ TORCHSPAN_GUARDED_BY(mutex_);
  Thread thread_;
};

}  // namespace torchspan::collective::shm
