#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/future.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/core/function.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/device/streams.h>

namespace torchspan::engine {

/// How a backward pass ended.
struct PassStatus {
  std::uint64_t pass = 0;
  std::exception_ptr error;  ///< null: success
  bool ok() const { return error == nullptr; }
};

/// End of one pass: reached when the graph's work is over (end()) and every held future has completed.
/// Callbacks then run once, in order of registration, on the thread that reached the end. Shared, so it
/// outlives the pass and its sink. Thread-safe; nothing runs under its lock.
class PassEnd final : public std::enable_shared_from_this<PassEnd> {
 public:
  using Callback = UniqueFunction<void(const PassStatus&)>;
  explicit PassEnd(std::uint64_t pass) : pass_(pass) {}

  std::uint64_t pass() const { return pass_; }
  /// Makes these the current streams of every thread that runs callbacks; once, before the pass runs.
  void run_on(device::Streams streams) { streams_ = std::move(streams); }
  /// Calls back after the end, or at once if it was reached. An exception from a callback becomes the error
  /// passed to later callbacks.
  void after(Callback callback);
  /// Calls back when all after() callbacks have returned; for the code that runs the pass, once. It reports
  /// to the program, whose next step must find the other callbacks done.
  void last(Callback callback);
  /// Whether there are callbacks other than last().
  bool is_watched() const;
  /// Calls back when the graph's work is over, before held futures are waited for. The callback sees the
  /// status and may still hold(). Its exception becomes the pass's error unless there is one. Throws
  /// Error{kInvalid} if the work is already over.
  void after_work(Callback callback);
  /// Calls back just before the end, when no hold remains. The callback sees the status of the whole pass
  /// and may still hold(). Its exception becomes the pass's error unless there is one. Throws
  /// Error{kInvalid} after the end.
  void before_end(Callback callback);
  /// Delays the end until `future` completes; its failure becomes the pass's, unless there is one. After
  /// the end throws the pass's failure, or Error{kInvalid} if it succeeded.
  void hold(Future<void> future);
  /// The graph's work is over, with or without an error; later calls are ignored.
  void end(std::exception_ptr error);
  /// Waits for held futures and callbacks, then rethrows the pass's failure. Call it on the thread that
  /// called end(), without holding a lock.
  void wait(Deadline deadline = Deadline::never());
  /// Whether the callbacks have been started.
  bool has_arrived() const;

 private:
  void release(std::exception_ptr error);
  void call_all(std::vector<Callback>& callbacks, PassStatus& status) const;

  const std::uint64_t pass_;
  device::Streams streams_;
  mutable Mutex mutex_;
  std::size_t holds_ TORCHSPAN_GUARDED_BY(mutex_) = 1;  // the first is the graph's own work
  bool ended_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool come_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::exception_ptr error_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Callback> work_callbacks_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Callback> decisions_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Callback> callbacks_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Callback> last_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Future<void>> continuations_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// Destination of a backward pass's parameter gradients, in `.grad` or an autograd context. A data-parallel
/// reducer reads and replaces gradients here during the pass and delays the end of the pass until its
/// all-reduces are done. Thread-safe.
class GradientSink {
 public:
  explicit GradientSink(std::uint64_t pass) : end_(std::make_shared<PassEnd>(pass)) {}
  virtual ~GradientSink() = default;
  GradientSink(const GradientSink&) = delete;
  GradientSink& operator=(const GradientSink&) = delete;

  /// Accumulated gradient of `parameter`; undefined if there is none.
  virtual at::Tensor gradient(const at::Tensor& parameter) const = 0;
  /// Adds `gradient`, shaped like `parameter`, dense or sparse. Move it in so that its memory can be
  /// adopted.
  virtual void accumulate(const at::Tensor& parameter, at::Tensor gradient) = 0;
  /// Replaces the accumulated gradient with `gradient` itself, without a copy.
  virtual void replace(const at::Tensor& parameter, at::Tensor gradient) = 0;
  /// Whether gradients are stored in `parameter.grad()`, as LibTorch's post-accumulate hooks expect.
  virtual bool writes_grad_field() const { return false; }

  std::uint64_t pass() const { return end_->pass(); }
  void after_work(PassEnd::Callback callback) { end_->after_work(std::move(callback)); }
  void before_end(PassEnd::Callback callback) { end_->before_end(std::move(callback)); }
  void after_pass(PassEnd::Callback callback) { end_->after(std::move(callback)); }
  void hold(Future<void> future) { end_->hold(std::move(future)); }
  const std::shared_ptr<PassEnd>& end() const { return end_; }

 private:
  const std::shared_ptr<PassEnd> end_;
};

}  // namespace torchspan::engine
