#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

namespace torchspan::engine {

/// Gradients in `.grad`, accumulated by LibTorch's rules. For passes of LibTorch's engine (through
/// NativeEnginePasses) and local GraphPasses that fill `.grad`.
class GradFieldSink final : public GradientSink {
 public:
  explicit GradFieldSink(std::uint64_t pass) : GradientSink(pass) {}
  at::Tensor gradient(const at::Tensor& parameter) const override;
  void accumulate(const at::Tensor& parameter, at::Tensor gradient) override;
  void replace(const at::Tensor& parameter, at::Tensor gradient) override;
  bool writes_grad_field() const override { return true; }

 private:
  mutable Mutex mutex_;
};

/// The running passes of LibTorch's engine (`loss.backward()`), as sinks. A pass that the engine completes ends
/// in the engine's callback queue: the work of all owners ends first, then the queue waits for the futures
/// that they hold, so `backward()` returns after them. A pass that the engine abandons ends with
/// Error{kCancelled}. Shared by the hooks of one owner. Thread-safe.
class NativeEnginePasses final : public std::enable_shared_from_this<NativeEnginePasses> {
 public:
  /// The sink of the pass whose node this thread runs. Throws Error{kInvalid} outside of a pass.
  std::shared_ptr<GradFieldSink> current();
  /// Makes both return the same sinks, for owners that use the gradients of the same parameters: their
  /// callbacks then run one after another. Call it while no pass runs.
  void unite(const std::shared_ptr<NativeEnginePasses>& other);

 private:
  class Ending;
  std::shared_ptr<NativeEnginePasses> united();
  void forget(const void* task);

  Mutex mutex_;
  std::uint64_t next_pass_ TORCHSPAN_GUARDED_BY(mutex_) = 1;
  std::unordered_map<const void*, std::shared_ptr<GradFieldSink>> sinks_ TORCHSPAN_GUARDED_BY(mutex_);
  std::shared_ptr<NativeEnginePasses> successor_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// How the owner of a hook uses the gradients of its parameter.
enum class GradientUse : std::uint8_t { kReads, kAverages, kSteps };

/// Reports to its owner that a pass has completed the gradient of one parameter. Add it to the parameter's
/// AccumulateGrad node as a post hook. Any engine calls it once for each pass that reaches the parameter,
/// after the gradient went to the sink; sink.gradient(parameter) may be undefined.
class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(at::Tensor parameter, std::shared_ptr<NativeEnginePasses> passes)
      : parameter_(std::move(parameter)), passes_(std::move(passes)) {}
  /// Called on the thread that drives the pass. An exception fails the pass.
  virtual void gradient_ready(GradientSink& sink, const at::Tensor& parameter) = 0;
  virtual GradientUse use() const { return GradientUse::kReads; }
  const std::shared_ptr<NativeEnginePasses>& passes() const { return passes_; }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) final;

 private:
  const at::Tensor parameter_;
  const std::shared_ptr<NativeEnginePasses> passes_;
};

/// The gradient hooks of a parameter's leaf node, in the order of their calls.
std::vector<GradientHook*> gradient_hooks(const at::Tensor& parameter);

/// Whether the pass of LibTorch's engine on this thread accumulates a gradient at `leaf`, an AccumulateGrad
/// node: torch::autograd::grad() accumulates none, backward() with inputs only those of the inputs. True
/// outside of LibTorch's passes.
bool pass_accumulates_at(torch::autograd::Node& leaf);

/// Reports to its owner that a pass reaches a node that is not a leaf. Add it to the node as a pre hook. Does
/// not change the gradients.
class PassHook : public torch::autograd::FunctionPreHook {
 public:
  explicit PassHook(std::shared_ptr<NativeEnginePasses> passes) : passes_(std::move(passes)) {}
  /// Called before the node runs, on the thread that drives the pass. An exception fails the pass.
  virtual void pass_arrives(GradientSink& sink) = 0;

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) final;

 private:
  const std::shared_ptr<NativeEnginePasses> passes_;
};

/// Whether a hook on a parameter's leaf uses its gradients so.
inline bool has_gradient_use(const at::Tensor& parameter, GradientUse use) {
  const auto hooks = gradient_hooks(parameter);
  return std::any_of(hooks.begin(), hooks.end(),
                     [use](const GradientHook* hook) { return hook->use() == use; });
}

}  // namespace torchspan::engine
