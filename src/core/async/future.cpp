#include <algorithm>

#include <torchspan/core/future.h>

namespace torchspan {
namespace {

/// How long a thread that waits for a device sleeps between two checks.
constexpr Duration kGatePoll = std::chrono::microseconds(50);

class CombinedGate final : public ValueGate {
 public:
  explicit CombinedGate(std::vector<std::shared_ptr<const ValueGate>> gates) : gates_(std::move(gates)) {}
  void pass() const override {
    for (const auto& gate : gates_) gate->pass();
  }
  std::shared_ptr<const ValueGate> renew() const override {
    std::vector<std::shared_ptr<const ValueGate>> renewed;
    for (const auto& gate : gates_) renewed.push_back(gate->renew());
    return std::make_shared<CombinedGate>(std::move(renewed));
  }
  bool done() const override {
    return std::all_of(gates_.begin(), gates_.end(), [](const auto& gate) { return gate->done(); });
  }

 private:
  const std::vector<std::shared_ptr<const ValueGate>> gates_;
};

}  // namespace

std::shared_ptr<const ValueGate> combine_gates(std::vector<std::shared_ptr<const ValueGate>> gates) {
  std::erase(gates, nullptr);
  if (gates.size() < 2) return gates.empty() ? nullptr : gates[0];
  return std::make_shared<CombinedGate>(std::move(gates));
}

void future_detail::throw_empty() {
  throw_invalid(
      "this Future is empty: it was made by its default constructor, or moved from; use one of a call or of "
      "a Promise");
}

std::exception_ptr future_detail::thread_ended() {
  return std::make_exception_ptr(Error(ErrorKind::kInvalid,
                                       "a callback of a future ended its thread (pthread_exit() was called, "
                                       "or the thread was canceled): return or "
                                       "throw instead"));
}

FutureStateBase::~FutureStateBase() {
  if (!is_of_parent()) return;
  // Their captures belong to the parent, and the parent may have been changing the list.
  keep_until_exit(new std::vector<UniqueFunction<void()>>(std::move(continuations_)));
}

void FutureStateBase::check_process() const {
  if (!is_of_parent()) return;
  const auto executor = executor_.lock();
  throw OwnerProcess::forked(executor ? executor->worker_name() : std::string());
}

bool FutureStateBase::claim() { return !claimed_.exchange(true, std::memory_order_acq_rel); }

void FutureStateBase::publish() {
  if (is_of_parent()) return done_.store(true, std::memory_order_release);
  std::vector<UniqueFunction<void()>> continuations;
  {
    MutexLock lock(mutex_);
    done_.store(true, std::memory_order_release);
    continuations.swap(continuations_);
    for (Parker* waiter : waiters_)
      waiter->unpark();  // a waiter's parker lives until it left under this lock
  }
  if (continuations.empty()) return;
  auto executor = executor_.lock();
  for (auto& continuation : continuations) {
    if (executor) {
      executor->post(std::move(continuation));
    } else {
      continuation();
    }
  }
}

bool FutureStateBase::wait_until(Deadline deadline) {
  if (done()) return true;
  check_process();
  auto executor = executor_.lock();
  if (!executor) throw Error(ErrorKind::kCancelled, "this future's worker is gone, so it can never complete");
  auto parker = executor->executor().make_parker();
  {
    MutexLock lock(mutex_);
    if (done_.load(std::memory_order_relaxed)) return true;
    waiters_.push_back(parker.get());
  }
  struct Leave {
    FutureStateBase& state;
    Parker* parker;
    ~Leave() {
      MutexLock lock(state.mutex_);
      std::erase(state.waiters_, parker);
    }
  } leave{*this, parker.get()};
  executor->wait(*parker, done_, deadline);
  return done();
}

void FutureStateBase::wait(Deadline deadline) {
  if (done()) return;
  check_process();
  const auto executor = executor_.lock();
  const TimePoint began = executor ? executor->executor().now() : TimePoint();
  if (wait_until(deadline)) return;
  throw Error(ErrorKind::kTimedOut,
              "the future did not complete before the deadline of this wait; it may complete later")
      .with_elapsed(executor->executor().now() - began);
}

void FutureStateBase::synchronize(Deadline deadline) const {
  if (!gate_) return;
  check_process();
  if (gate_->done()) return;
  const auto executor = executor_.lock();
  if (!executor)
    throw Error(ErrorKind::kCancelled, "this future's worker is gone, so its device cannot be awaited");
  const auto parker = executor->executor().make_parker();
  while (!gate_->done()) {
    if (deadline.passed(executor->executor().now())) {
      throw Error(ErrorKind::kTimedOut, "the device did not finish the value of this future by the deadline");
    }
    parker->park(earlier(deadline, executor->executor().deadline_in(kGatePoll)));
  }
}

Deadline FutureStateBase::deadline_in(Duration timeout) const {
  auto executor = executor_.lock();
  return executor ? executor->executor().deadline_in(timeout) : Deadline::never();
}

void FutureStateBase::on_done(UniqueFunction<void()> continuation) {
  check_process();
  {
    MutexLock lock(mutex_);
    if (!done_.load(std::memory_order_relaxed)) {
      continuations_.push_back(std::move(continuation));
      return;
    }
  }
  if (auto executor = executor_.lock()) {
    executor->post(std::move(continuation));
  } else {
    continuation();
  }
}

void FutureStateBase::on_done_bound(UniqueFunction<void()> continuation) {
  if (auto executor = executor_.lock()) continuation = executor->bind(std::move(continuation));
  on_done(std::move(continuation));
}

}  // namespace torchspan
