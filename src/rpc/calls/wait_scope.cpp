#include <torchspan/rpc/worker.h>

namespace torchspan {
namespace {
/// How long to wait before the next try if the system has no thread for the pool.
constexpr Duration kOverloadedPause = std::chrono::milliseconds(1);
}  // namespace
namespace rpc {

void CallGroup::begin() {
  MutexLock lock(mutex_);
  ++out_;
}

void CallGroup::end(std::exception_ptr error) {
  Promises settled, all_ended;
  std::exception_ptr failure;
  {
    MutexLock lock(mutex_);
    if (error && !failure_) failure_ = std::move(error);
    failure = failure_;
    if (--out_ == 0) all_ended.swap(all_ended_);
    if (out_ == 0 || failure_) settled.swap(settled_);
  }
  for (auto& promise : settled) {
    failure ? promise.set_error(failure) : promise.set_value();
  }
  for (auto& promise : all_ended) promise.set_value();
}

Future<void> CallGroup::settled() {
  MutexLock lock(mutex_);
  if (failure_) return make_failed_future<void>(failure_);
  if (out_ == 0) return make_ready_future<void>();
  settled_.emplace_back(continuations_);
  return settled_.back().future();
}

Future<void> CallGroup::all_ended() {
  MutexLock lock(mutex_);
  if (out_ == 0) return make_ready_future<void>();
  all_ended_.emplace_back(continuations_);
  return all_ended_.back().future();
}

}  // namespace rpc

WaitScope::WaitScope(const Worker& worker, CallOptions options)
    : Caller(worker.backend(), std::move(options)) {
  backend_->check_may_wait();  // the destructor waits, and cannot throw
  group_ = std::make_shared<rpc::CallGroup>(backend_->continuations());
}

WaitScope::~WaitScope() {
  if (!backend_->runtime().executor.process().is_current()) return;
  std::vector<Pool::ExtraThread> extra;
  for (;;) {
    try {
      group_->all_ended().wait();
      return;
    } catch (const Error& error) {
      // Otherwise the worker is gone, and none of its calls is in flight.
      if (error.kind() != ErrorKind::kOverloaded) return;
    }
    // The calls may refer to objects that end with the scope: it stays until the calls have ended.
    extra.emplace_back(backend_->pool());
    backend_->runtime().executor.sleep(kOverloadedPause);
  }
}

void WaitScope::wait() {
  backend_->check_may_wait();
  group_->settled().wait();
}
void WaitScope::wait(Duration timeout) {
  backend_->check_may_wait();
  group_->settled().wait(timeout);
}

}  // namespace torchspan
