#include "python/c10d/work.h"

#include <fmt/format.h>
#include <mutex>

#include "python/errors.h"

namespace torchspan::python {

/// The end of an operation: on the thread that needs it first, and once. Outlives its Work if nobody waited.
class Work::Ending {
 public:
  Ending(std::vector<at::Tensor> outputs, std::unique_ptr<PendingCall> call, const char* operation)
      : outputs_(std::move(outputs)), call_(std::move(call)), operation_(operation) {}

  PendingCall& call() const { return *call_; }
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  const char* operation() const { return operation_; }

  /// Of a completed operation: its failure, or null.
  std::exception_ptr conclude() {
    std::call_once(once_, [this] {
      try {
        call_->finish();
      } catch (...) {
        failure_ = to_torch_error(std::current_exception(), false);
      }
    });
    return failure_;
  }

 private:
  const std::vector<at::Tensor> outputs_;
  const std::unique_ptr<PendingCall> call_;
  const char* const operation_;
  std::once_flag once_;
  std::exception_ptr failure_;
};

Work::Work(const Call& call, std::vector<at::Tensor> outputs, std::unique_ptr<PendingCall> pending)
    : c10d::Work(-1, call.type, (call.backend + ":" + call.operation).c_str(), call.inputs),
      ending_(std::make_shared<Ending>(std::move(outputs), std::move(pending), call.operation)),
      number_(call.number),
      world_(call.world) {}

Work::~Work() {
  const auto ending = ending_;
  if (!process_.is_current()) {
    keep_until_exit(new std::shared_ptr<Ending>(ending));
  } else if (ending->call().done()) {
    ending->conclude();
  } else {
    ending->call().when_done([ending] { ending->conclude(); });
  }
}

bool Work::isCompleted() {
  if (!ending_->call().done()) return false;
  finish(ending_->conclude());
  return true;
}

bool Work::isSuccess() const { return ending_->call().done() && ending_->conclude() == nullptr; }

std::exception_ptr Work::exception() const { return ending_->call().done() ? ending_->conclude() : nullptr; }

int Work::sourceRank() const {
  if (!source_) return c10d::Work::sourceRank();
  return source_->load();
}

std::vector<at::Tensor> Work::result() { return ending_->outputs(); }

bool Work::wait(std::chrono::milliseconds timeout) {
  const Duration limit = timeout > std::chrono::milliseconds::zero() ? Duration(timeout) : Duration::zero();
  if (!with_torch_errors([&] { return ending_->call().wait_for(limit); }, false)) {
    std::rethrow_exception(
        to_torch_error(std::make_exception_ptr(Error(
                           ErrorKind::kTimedOut,
                           fmt::format("{} did not complete within the {:g} s that wait() was given; it goes "
                                       "on",
                                       ending_->operation(), to_seconds(limit)))),
                       false));
  }
  const std::exception_ptr failure = ending_->conclude();
  finish(failure);
  const auto future = [this] {
    MutexLock lock(future_mutex_);
    return future_;
  }();
  if (future) future->wait();  // programs read its value after this
  if (failure) std::rethrow_exception(failure);
  return true;
}

void Work::abort() {
  TORCH_CHECK(false,
              "torchspan: one operation cannot be aborted; abort() of the process group ends all of them");
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  MutexLock lock(future_mutex_);
  if (future_) return future_;
  with_torch_errors([this] { process_.check(); }, false);
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  const auto complete = [ending = ending_, future = future_] {
    if (const std::exception_ptr failure = ending->conclude()) {
      future->setError(failure);
    } else {
      future->markCompleted(c10::IValue(ending->outputs()));
    }
  };
  if (ending_->call().done()) {
    complete();  // it has no callbacks yet
    return future_;
  }
  ending_->call().when_done([complete, world = world_] {
    // Not on this thread: a callback may wait for another operation of the group.
    const std::shared_ptr<World> alive = world.lock();
    alive ? alive->post(complete) : complete();
  });
  return future_;
}

}  // namespace torchspan::python
