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

namespace torchspan::engine {

/// How a backward pass ended.
struct PassStatus {
  std::uint64_t pass = 0;
  std::exception_ptr error;  ///< null: the pass did all its work
  bool ok() const { return error == nullptr; }
};

/// The end of one pass: it has come when the graph's work is over (end()) and every held future has
/// completed; then the callbacks run, once, in the order they were given, on the thread that brought the end.
/// Shared, so that it outlives the pass and its sink. Thread-safe; nothing runs under its lock.
class PassEnd final : public std::enable_shared_from_this<PassEnd> {
 public:
  using Callback = UniqueFunction<void(const PassStatus&)>;
  explicit PassEnd(std::uint64_t pass) : pass_(pass) {}

  std::uint64_t pass() const { return pass_; }
  /// Calls back after the end; at once when it has come. An exception that leaves a callback becomes the
  /// error of the callbacks after it.
  void after(Callback callback);
  /// The same, when all callbacks of after() have returned: for the one who runs the pass, once. It tells the
  /// program, whose next step may meet what the others have finished only then.
  void last(Callback callback);
  /// Whether anybody but last() waits for the end.
  bool is_watched() const;
  /// Calls back when the graph's work is over, before the held futures are waited for: the callback sees how
  /// the work ended and may still hold(). What it throws becomes the pass's error unless there is one. Throws
  /// Error{kInvalid} when the work is over already.
  void after_work(Callback callback);
  /// Calls back when nothing puts the end off any more and before it comes: the callback sees how everything
  /// else went, and may still hold(). For a decision that depends on the whole pass. What it throws becomes
  /// the pass's error unless there is one. Throws Error{kInvalid} when the end has come.
  void before_end(Callback callback);
  /// Puts the end off until `future` completes; its failure becomes the pass's, unless the pass has one.
  /// When the end has come, throws the pass's failure, or Error{kInvalid} if there was none.
  void hold(Future<void> future);
  /// The graph's work is over, with `error` or without; later calls are ignored.
  void end(std::exception_ptr error);
  /// Waits for the held futures and the callbacks, then rethrows the pass's failure. To be called by the
  /// thread that called end(), while it holds no lock.
  void wait(Deadline deadline = Deadline::never());
  /// Whether the callbacks have been started.
  bool has_come() const;

 private:
  void release(std::exception_ptr error);
  static void call_all(std::vector<Callback>& callbacks, PassStatus& status);

  const std::uint64_t pass_;
  mutable Mutex mutex_;
  std::size_t holds_ TORCHSPAN_GUARDED_BY(mutex_) = 1;  // the graph's own work is the first
  bool ended_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool come_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::exception_ptr error_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Callback> work_callbacks_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Callback> decisions_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Callback> callbacks_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Callback> last_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Future<void>> continuations_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// Where one backward pass puts the gradients of parameters, and the seam to whoever works on them while the
/// pass runs: a data-parallel reducer reads and replaces gradients here and puts the end of the pass off
/// until its all-reduces are done. Whether gradients live in `.grad` or in an autograd context is the sink's
/// secret. Thread-safe.
class GradientSink {
 public:
  explicit GradientSink(std::uint64_t pass) : end_(std::make_shared<PassEnd>(pass)) {}
  virtual ~GradientSink() = default;
  GradientSink(const GradientSink&) = delete;
  GradientSink& operator=(const GradientSink&) = delete;

  /// What has been accumulated for `parameter`; undefined when nothing has.
  virtual at::Tensor gradient(const at::Tensor& parameter) const = 0;
  /// Adds `gradient`, shaped like `parameter`, dense or sparse; move it in so that its memory may be adopted.
  virtual void accumulate(const at::Tensor& parameter, at::Tensor gradient) = 0;
  /// Puts `gradient` in place of what has been accumulated; it is kept as it is, not copied.
  virtual void replace(const at::Tensor& parameter, at::Tensor gradient) = 0;
  /// Whether gradients land in `parameter.grad()`, which LibTorch's post-accumulate hooks expect.
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
