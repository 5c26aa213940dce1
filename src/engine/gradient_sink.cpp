#include <utility>

#include <torchspan/detail/engine/gradient_sink.h>

namespace torchspan::engine {

void PassEnd::after(Callback callback) {
  PassStatus status{pass_, nullptr};
  {
    MutexLock lock(mutex_);
    if (!come_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
    status.error = error_;
  }
  const device::StreamsScope streams(streams_);
  callback(status);
}

void PassEnd::last(Callback callback) {
  MutexLock lock(mutex_);
  if (come_ || last_)
    throw Error(ErrorKind::kInvalid, "this pass has ended, or its last callback is set already");
  last_.emplace(std::move(callback));
}

bool PassEnd::is_watched() const {
  MutexLock lock(mutex_);
  return !callbacks_.empty();
}

void PassEnd::after_work(Callback callback) {
  MutexLock lock(mutex_);
  if (ended_)
    throw Error(ErrorKind::kInvalid,
                "this pass's work is over; register after_work() callbacks while it runs");
  work_callbacks_.push_back(std::move(callback));
}

void PassEnd::before_end(Callback callback) {
  MutexLock lock(mutex_);
  if (come_)
    throw Error(ErrorKind::kInvalid, "this pass has ended; register before_end() callbacks before that");
  decisions_.push_back(std::move(callback));
}

void PassEnd::hold(Future<void> future) {
  {
    MutexLock lock(mutex_);
    if (come_) {
      if (error_) std::rethrow_exception(error_);
      throw Error(ErrorKind::kInvalid, "this pass has ended; hold futures before its gradients are complete");
    }
    ++holds_;
  }
  Future<void> continuation =
      future.then([self = shared_from_this()](const Future<void>& done) { self->release(done.error()); });
  MutexLock lock(mutex_);
  continuations_.push_back(std::move(continuation));
}

void PassEnd::end(std::exception_ptr error) {
  std::vector<Callback> callbacks;
  PassStatus status{pass_, std::move(error)};
  {
    MutexLock lock(mutex_);
    if (std::exchange(ended_, true)) return;
    callbacks.swap(work_callbacks_);
  }
  call_all(callbacks, status);
  release(status.error);
}

void PassEnd::call_all(std::vector<Callback>& callbacks, PassStatus& status) const {
  const device::StreamsScope streams(streams_);
  for (Callback& callback : callbacks) {
    try {
      callback(status);
    } catch (...) {
      if (!status.error) status.error = std::current_exception();
    }
  }
}

void PassEnd::release(std::exception_ptr error) {
  std::vector<Callback> callbacks;
  PassStatus status{pass_, nullptr};
  for (;;) {
    std::vector<Callback> decisions;
    {
      MutexLock lock(mutex_);
      if (error && !error_) error_ = std::move(error);
      status.error = error_;
      if (holds_ > 1 || decisions_.empty()) {
        if (--holds_ > 0) return;
        come_ = true;
        callbacks.swap(callbacks_);
        if (last_) callbacks.push_back(*std::exchange(last_, std::nullopt));
        break;
      }
      decisions.swap(decisions_);  // they run while this last hold remains, and may add holds
    }
    call_all(decisions, status);
    error = status.error;
  }
  call_all(callbacks, status);
  MutexLock lock(mutex_);
  error_ = status.error;
}

void PassEnd::wait(Deadline deadline) {
  for (std::size_t next = 0;; ++next) {
    Future<void> continuation;
    {
      MutexLock lock(mutex_);
      if (next == continuations_.size()) break;
      continuation = continuations_[next];
    }
    continuation.wait(deadline);
  }
  MutexLock lock(mutex_);
  if (!come_) throw Error(ErrorKind::kInvalid, "this pass has not ended: its graph's work still runs");
  if (error_) std::rethrow_exception(error_);
}

bool PassEnd::has_arrived() const {
  MutexLock lock(mutex_);
  return come_;
}

}  // namespace torchspan::engine
