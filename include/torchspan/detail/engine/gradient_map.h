#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/device/streams.h>
#include <torchspan/detail/engine/gradient_sink.h>

namespace torchspan::engine {

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
