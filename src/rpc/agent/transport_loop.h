#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/transport.h>

#include "rpc/agent/timers.h"
#include "rpc/calls/call_table.h"
#include "rpc/calls/serving.h"

namespace torchspan::rpc {

/// Grants the right to poll the transport. Unlike a mutex, it may be held while its holder sleeps in the
/// transport, so a thread must not wait for it while it holds something that the holder needs.
class DriverLock {
 public:
  bool try_take() { return !taken_.exchange(true, std::memory_order_acquire); }
  void take(Executor& executor) {
    while (!try_take()) executor.yield();
  }
  void give() { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_{false};
};

/// Holds the driver lock for a scope. The constructor with an executor waits for the lock; the other one only
/// tries.
class DriverLockGuard {
 public:
  DriverLockGuard(DriverLock& driver_lock, Executor& executor) : driver_lock_(driver_lock), held_(true) {
    driver_lock_.take(executor);
  }
  explicit DriverLockGuard(DriverLock& driver_lock)
      : driver_lock_(driver_lock), held_(driver_lock.try_take()) {}
  ~DriverLockGuard() {
    if (held_) driver_lock_.give();
  }
  DriverLockGuard(const DriverLockGuard&) = delete;
  bool held() const { return held_; }

 private:
  DriverLock& driver_lock_;
  const bool held_;
};

struct RequestHandler;
class RequestServer;

/// A request whose handler runs on the thread that received it.
struct InlineCall {
  IncomingPtr call;
  const RequestHandler* handler = nullptr;
};

/// What the loop does besides the transport.
struct LoopWork {
  std::function<void()> fail_expired;  ///< fails the calls whose deadline passed; the loop's thread runs it
  std::function<void()> poll_devices;  ///< looks at the devices; every thread that polls runs it, often
};

/// Polls the transport, on a dedicated thread or on callers that wait, and runs timers. One thread polls at a
/// time: the one that holds the driver lock.
class TransportLoop final {
 public:
  TransportLoop(Runtime& runtime, const CallTable& calls, RequestServer& server, LoopWork work);

  /// Starts the thread. Without a transport it runs timers only.
  void start(net::Transport* transport, const std::string& worker);
  /// Ends the thread. From then on, callers do not poll either.
  void stop();
  /// Receives what has arrived and drops the inline calls, after stop().
  void drain();

  /// Runs `job` on the loop's thread; it must be short.
  Timers::Id at(Deadline when, UniqueFunction<void()> job);
  void cancel(const Timers::Id& id) { timers_.cancel(id); }
  /// Posts `job` to `continuations` after a delay.
  void after(Duration delay, std::shared_ptr<ContinuationExecutor> continuations, UniqueFunction<void()> job);
  /// Wakes the thread if it would sleep beyond `deadline`.
  void wake_by(Deadline deadline);
  void wake();

  /// Whether a waiting caller polls. Call this and add_inline() inside a poll, with the driver lock held.
  bool driven_by_caller() const { return driven_by_caller_; }
  void add_inline(InlineCall call) { inline_calls_.push_back(std::move(call)); }
  DriverLock& driver_lock() { return driver_lock_; }

  /// For callers that wait, on any thread: polls once, unless another thread polls. Returns false if another thread polls or
  /// nothing arrived.
  bool drive();
  /// Registers a caller that polls; end_driving() removes it. `unserved`: what the caller waits for has not arrived.
  void begin_driving() { drivers_.fetch_add(1, std::memory_order_relaxed); }
  void end_driving(bool unserved);
  /// Between begin_driving() and end_driving(): the caller runs a job and does not poll. If that takes long, the loop's
  /// thread polls again until the job has ended.
  void begin_job() { job_since_.store(executor_.now()); }
  void end_job() { job_since_.store(TimePoint::max()); }
  /// Throws Error{kInvalid} on a thread that must not wait.
  void check_may_wait() const;

 private:
  using InlineCalls = std::vector<InlineCall>;
  void run();
  /// Whether a driver polls, or is going to after a short job.
  bool is_driven(TimePoint now) const;
  void run_timers_only();
  /// Polls once and runs the inline calls that arrived. Returns false if nothing arrived.
  bool poll_once();
  void run_here(const InlineCalls& calls);
  /// Sleeps in the transport until a message arrives or a timer or deadline is due.
  void rest_in_transport();
  Deadline next_due() const { return earlier(calls_.next_deadline(), timers_.next()); }

  Executor& executor_;
  const CallTable& calls_;
  RequestServer& server_;
  const LoopWork work_;
  net::Transport* transport_ = nullptr;  ///< set before the thread starts
  Timers timers_;
  DriverLock driver_lock_;
  bool driven_by_caller_ = false;  ///< the holder of the driver lock uses it
  InlineCalls inline_calls_;       ///< likewise
  std::atomic<int> drivers_{0};
  std::atomic<TimePoint> job_since_{
      TimePoint::max()};  ///< when the one that runs a job began it; max(): none does
  std::atomic<bool> stopping_{false};
  std::atomic<bool> yields_to_callers_{false};  ///< the thread pauses while waiting callers poll
  const std::unique_ptr<Parker> aside_parker_;
  const std::unique_ptr<Parker> timer_parker_;             ///< the thread sleeps here without a transport
  std::atomic<TimePoint> sleeps_until_{TimePoint::min()};  ///< min(): the thread is awake
  Thread thread_;
};

}  // namespace torchspan::rpc
