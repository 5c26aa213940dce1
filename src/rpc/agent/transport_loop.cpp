#include "rpc/agent/transport_loop.h"

#include <algorithm>
#include <span>
#include <utility>

#include <torchspan/detail/rpc/extension.h>

#include "rpc/agent/request_server.h"

namespace torchspan::rpc {
namespace {

/// How long the thread pauses for callers that poll, before it checks again.
constexpr Duration kAside = std::chrono::microseconds(200);
/// How many replies of inline calls wait for each other, to be sent together.
constexpr std::size_t kRepliesTogether = 16;

/// Corks the channels of calls.
class CorkedReplies {
 public:
  explicit CorkedReplies(std::span<const InlineCall> calls) {
    if (calls.size() == 1) return;
    for (const InlineCall& call : calls) {
      const auto& channel = call.call->channel;
      if (!channel || std::ranges::find(channels_, channel) != channels_.end()) continue;
      channel->cork();
      channels_.push_back(channel);
    }
  }
  ~CorkedReplies() {
    for (const auto& channel : channels_) channel->uncork();
  }
  CorkedReplies(const CorkedReplies&) = delete;

 private:
  std::vector<std::shared_ptr<net::Channel>> channels_;
};

}  // namespace

TransportLoop::TransportLoop(Runtime& runtime, const CallTable& calls, RequestServer& server, LoopWork work)
    : executor_(runtime.executor),
      calls_(calls),
      server_(server),
      work_(std::move(work)),
      aside_parker_(executor_.make_parker()),
      timer_parker_(executor_.make_parker()) {}

void TransportLoop::start(net::Transport* transport, const std::string& worker) {
  transport_ = transport;
  if (transport_ == nullptr) {
    thread_ = executor_.spawn(worker + "/timer", [this] { run_timers_only(); });
  } else {
    thread_ = executor_.spawn(worker + "/net", [this] { run(); });
  }
}

void TransportLoop::run() {
  TimePoint last = executor_.now();
  while (!stopping_.load(std::memory_order_acquire)) {
    const bool busy = poll_once();
    work_.poll_devices();
    work_.fail_expired();
    timers_.run_due(executor_.now());
    const Duration spin = executor_.spin_limit();
    if (busy) {
      last = executor_.now();
    } else if (spin > Duration::zero() && is_driven(executor_.now())) {
      yields_to_callers_.store(true);
      aside_parker_->park(executor_.deadline_in(kAside));
      yields_to_callers_.store(false);
      last = executor_.now();
    } else if (spin > Duration::zero() && executor_.now() - last < spin) {
      executor_.yield();
    } else {
      rest_in_transport();
    }
  }
}

bool TransportLoop::is_driven(TimePoint now) const {
  const int drivers = drivers_.load(std::memory_order_relaxed);
  const TimePoint since = job_since_.load(std::memory_order_relaxed);
  const bool in_long_job = since < now && now - since > kAside;
  return drivers > (in_long_job ? 1 : 0);
}

bool TransportLoop::poll_once() {
  InlineCalls calls;
  bool busy = false;
  {
    DriverLockGuard hold(driver_lock_, executor_);
    busy = transport_->poll();
    calls.swap(inline_calls_);
  }
  run_here(calls);
  return busy;
}

void TransportLoop::run_here(const InlineCalls& calls) {
  for (std::span<const InlineCall> left = calls; !left.empty();) {
    const auto together = left.first(std::min(left.size(), kRepliesTogether));
    left = left.subspan(together.size());
    const CorkedReplies corked(together);
    for (const InlineCall& call : together) server_.run_here(call);
  }
}

void TransportLoop::rest_in_transport() {
  sleeps_until_.store(TimePoint::max());  // a deadline added now wakes the thread, even if counted below
  const Deadline until = next_due();
  sleeps_until_.store(until.at());
  if (!stopping_.load()) {
    DriverLockGuard hold(driver_lock_, executor_);
    transport_->wait(until);
  }
  sleeps_until_.store(TimePoint::min());
}

void TransportLoop::run_timers_only() {
  while (!stopping_.load(std::memory_order_acquire)) {
    work_.fail_expired();
    timers_.run_due(executor_.now());
    sleeps_until_.store(TimePoint::max());
    const Deadline until = next_due();
    sleeps_until_.store(until.at());
    timer_parker_->park(until);
    sleeps_until_.store(TimePoint::min());
  }
}

bool TransportLoop::drive() {
  if (stopping_.load(std::memory_order_relaxed)) return false;
  work_.poll_devices();
  if (transport_ == nullptr) return false;
  InlineCalls calls;
  bool busy = false;
  {
    const DriverLockGuard hold(driver_lock_);
    if (!hold.held() || stopping_.load()) return false;
    struct ByCaller {
      bool& flag;
      explicit ByCaller(bool& driven) : flag(driven) { flag = true; }
      ~ByCaller() { flag = false; }
    } const by_caller(driven_by_caller_);
    busy = transport_->poll();
    calls.swap(inline_calls_);
  }
  for (const InlineCall& call : calls) server_.run_on_pool(call);
  return busy;
}

void TransportLoop::end_driving(bool unserved) {
  drivers_.fetch_sub(1, std::memory_order_relaxed);
  if (unserved && yields_to_callers_.load()) aside_parker_->unpark();
}

void TransportLoop::check_may_wait() const {
  const IncomingPtr& served = Environment::served();
  // Continuations run in the environment of the call that added them, but on threads of the pool.
  if (!served || served->inline_thread.load() != std::this_thread::get_id()) return;
  throw_invalid(
      "a function declared kInline waits for a future, on the thread that would receive it; declare it "
      "without kInline, or make it a coroutine");
}

Timers::Id TransportLoop::at(Deadline when, UniqueFunction<void()> job) {
  const Timers::Added added = timers_.at(when, std::move(job));
  if (added.earliest) wake_by(when);
  return added.id;
}

void TransportLoop::after(Duration delay, std::shared_ptr<ContinuationExecutor> continuations,
                          UniqueFunction<void()> job) {
  at(executor_.deadline_in(delay), [continuations = std::move(continuations),
                                    job = std::move(job)]() mutable { continuations->post(std::move(job)); });
}

void TransportLoop::wake_by(Deadline deadline) {
  if (deadline.at() < sleeps_until_.load()) wake();
}

void TransportLoop::wake() {
  if (transport_ != nullptr) transport_->wake();
  timer_parker_->unpark();
}

void TransportLoop::stop() {
  stopping_.store(true);
  wake();
  thread_.join();
  timers_.close();
}

void TransportLoop::drain() {
  if (transport_ == nullptr) return;
  InlineCalls calls;
  // A waiting caller may still poll; it finds stopping_ set when it takes the driver lock next.
  DriverLockGuard hold(driver_lock_, executor_);
  transport_->poll();
  calls.swap(inline_calls_);
}

}  // namespace torchspan::rpc
