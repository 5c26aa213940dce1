#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/owner_process.h>

#include "python/job.h"

namespace torchspan::python {

/// An operation of a group, and what is left to do once it is complete.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  virtual bool done() const = 0;
  /// Waits until it completed, successful or not; the calling thread drives the group. Returns false if `timeout` passes
  /// first; zero: no limit.
  virtual bool wait_for(Duration timeout) const = 0;
  /// Runs `then` once it completed, on a thread of the group.
  virtual void when_done(std::function<void()> then) const = 0;
  /// Of a completed operation: throws its failure, or writes its results to the program's tensors. Call once.
  virtual void finish() = 0;
};

template <class T>
class PendingCallOf final : public PendingCall {
 public:
  PendingCallOf(Future<T> future, std::function<void(const T&)> take)
      : future_(std::move(future)), take_(std::move(take)) {}

  bool done() const override { return future_.done(); }
  bool wait_for(Duration timeout) const override {
    return timeout == Duration::zero() ? future_.wait_until(Deadline::never()) : future_.wait_for(timeout);
  }
  void when_done(std::function<void()> then) const override {
    future_.add_done_callback([then = std::move(then)](const Future<T>&) { then(); });
  }
  void finish() override {
    const T value = future_.wait();
    if (take_) take_(value);
  }

 private:
  const Future<T> future_;
  const std::function<void(const T&)> take_;  ///< may be empty
};

/// c10d's handle of an operation. wait() runs the group's operations on the calling thread; the future of getFuture()
/// completes without a waiter. A failure is a torch.distributed.DistBackendError. Thread-safe.
class Work final : public c10d::Work {
 public:
  /// The profiler shows "<backend>:<operation>".
  struct Call {
    const std::string& backend;
    const char* operation;
    c10d::OpType type;
    std::uint64_t number;                   ///< of the group's calls
    const std::vector<at::Tensor>& inputs;  ///< whose shapes the profiler shows
    const std::shared_ptr<World>& world;    ///< runs the callbacks of futures
  };
  /// `outputs`: result(), and the value of the future.
  Work(const Call& call, std::vector<at::Tensor> outputs, std::unique_ptr<PendingCall> pending);
  /// An operation that nobody waited for still writes its results; not in a forked child.
  ~Work() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return number_; }
  /// Of a receive from any rank: the rank of the group that sent.
  void set_source(std::shared_ptr<std::atomic<int>> source) { source_ = std::move(source); }

 private:
  class Ending;

  const OwnerProcess process_;
  const std::shared_ptr<Ending> ending_;
  const std::uint64_t number_;
  const std::weak_ptr<World> world_;
  std::shared_ptr<std::atomic<int>> source_;
  Mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ TORCHSPAN_GUARDED_BY(future_mutex_);
};

}  // namespace torchspan::python
