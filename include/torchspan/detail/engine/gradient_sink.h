#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <unordered_map>
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

  /// Whether the pass runs the hooks that LibTorch and programs added to AccumulateGrad nodes. GradientHooks always run.
  virtual bool runs_leaf_hooks() const { return true; }

  std::uint64_t pass() const { return end_->pass(); }
  void after_work(PassEnd::Callback callback) { end_->after_work(std::move(callback)); }
  void before_end(PassEnd::Callback callback) { end_->before_end(std::move(callback)); }
  void after_pass(PassEnd::Callback callback) { end_->after(std::move(callback)); }
  void hold(Future<void> future) { end_->hold(std::move(future)); }
  const std::shared_ptr<PassEnd>& end() const { return end_; }

 private:
  const std::shared_ptr<PassEnd> end_;
};

/// A parameter and its accumulated gradient.
struct ParameterGradient {
  at::Tensor parameter;
  at::Tensor gradient;
};

/// Gradients by parameter, separate from `.grad`; owned by an autograd context. A parameter is identified
/// by its tensor object, not its storage. Ordered by first accumulation. A returned gradient never changes:
/// sums are in place only in memory that has no other owner. Thread-safe.
class GradientMap {
 public:
  /// `events` are for gradients on devices with streams; null: the map creates them.
  explicit GradientMap(device::EventPoolPtr events = {});
  /// Adds `gradient` to the gradient of `parameter`. A first dense gradient is adopted if it and its memory
  /// have no other owner and its layout is LibTorch's for `.grad` (as a dense parameter's, else row-major);
  /// otherwise it is copied to that layout. Indices and values of a first sparse one are each adopted or
  /// copied likewise. Sparse + sparse stays sparse; dense + sparse, in either order, becomes dense.
  void accumulate(const at::Tensor& parameter, at::Tensor gradient);
  /// Replaces the gradient with `gradient`, which may share memory.
  void replace(const at::Tensor& parameter, at::Tensor gradient);
  /// Undefined if there is none. This thread's current stream waits for the work of all passes that added to
  /// the gradient; later passes wait for what it has been given when they add.
  at::Tensor gradient(const at::Tensor& parameter) const;
  /// All gradients, in order of first accumulation; each as gradient() returns it.
  std::vector<ParameterGradient> gradients() const;
  std::size_t size() const;
  void clear();

 private:
  struct Entry {
    explicit Entry(at::Tensor parameter) : parameter(std::move(parameter)) {}
    const at::Tensor parameter;
    mutable Mutex mutex;
    at::Tensor gradient TORCHSPAN_GUARDED_BY(mutex);
    std::optional<device::Mark> written TORCHSPAN_GUARDED_BY(mutex);    // on devices with streams
    std::vector<c10::Stream> readers TORCHSPAN_GUARDED_BY(mutex) = {};  // since then
  };
  /// Makes this thread's current stream wait for what earlier streams did with the gradient.
  void join(Entry& entry) const TORCHSPAN_REQUIRES(entry.mutex);
  void mark_written(Entry& entry) const TORCHSPAN_REQUIRES(entry.mutex);
  at::Tensor read(Entry& entry) const TORCHSPAN_REQUIRES(entry.mutex);
  std::shared_ptr<Entry> find(const at::Tensor& parameter) const;
  std::shared_ptr<Entry> find_or_add(const at::Tensor& parameter);

  const device::EventPoolPtr events_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<Entry>> order_ TORCHSPAN_GUARDED_BY(mutex_);
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<Entry>> entries_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::engine
