#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

namespace torchspan::engine {

/// A parameter and what passes have accumulated for it.
struct ParameterGradient {
  at::Tensor parameter;
  at::Tensor gradient;
};

/// Gradients by parameter, apart from `.grad`: what an autograd context owns. A parameter is the tensor
/// object itself, not its storage. Order is that of first accumulation. A gradient handed out never changes
/// later: sums are made in place only in memory that nobody else holds. Thread-safe.
class GradientMap {
 public:
  /// Adds `gradient` to what `parameter` has. A first dense gradient is adopted when nobody else holds it or
  /// its memory and it is laid out as LibTorch lays out `.grad` (like a dense parameter, else row-major), and
  /// copied so otherwise; of a first sparse one, indices and values are adopted likewise, each for itself.
  /// Sparse + sparse stays sparse; dense and sparse, in either order, become dense.
  void accumulate(const at::Tensor& parameter, at::Tensor gradient);
  /// Puts `gradient`, which may share memory with others, in the place of what there is.
  void replace(const at::Tensor& parameter, at::Tensor gradient);
  /// Undefined when there is none.
  at::Tensor gradient(const at::Tensor& parameter) const;
  /// All, in the order of their first accumulation.
  std::vector<ParameterGradient> gradients() const;
  std::size_t size() const;
  void clear();

 private:
  struct Entry {
    explicit Entry(at::Tensor parameter) : parameter(std::move(parameter)) {}
    const at::Tensor parameter;
    mutable Mutex mutex;
    at::Tensor gradient TORCHSPAN_GUARDED_BY(mutex);
  };
  std::shared_ptr<Entry> find(const at::Tensor& parameter) const;
  std::shared_ptr<Entry> find_or_add(const at::Tensor& parameter);

  mutable Mutex mutex_;
  std::vector<std::shared_ptr<Entry>> order_ TORCHSPAN_GUARDED_BY(mutex_);
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<Entry>> entries_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// One pass's view of a GradientMap, which must outlive it.
class MapSink final : public GradientSink {
 public:
  explicit MapSink(GradientMap& gradients, std::uint64_t pass = 0)
      : GradientSink(pass), gradients_(gradients) {}
  at::Tensor gradient(const at::Tensor& parameter) const override { return gradients_.gradient(parameter); }
  void accumulate(const at::Tensor& parameter, at::Tensor gradient) override {
    gradients_.accumulate(parameter, std::move(gradient));
  }
  void replace(const at::Tensor& parameter, at::Tensor gradient) override {
    gradients_.replace(parameter, std::move(gradient));
  }

 private:
  GradientMap& gradients_;
};

}  // namespace torchspan::engine
