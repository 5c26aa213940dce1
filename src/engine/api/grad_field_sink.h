#pragma once
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

/// Gradients in `.grad`, accumulated by LibTorch's rules. Serves the passes of LibTorch's own engine (through
/// NativeEnginePasses) and local passes of ours that want `.grad`.
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

/// The passes of LibTorch's own engine (`loss.backward()`) that are under way, as sinks. A pass that the
/// engine completes ends through its callback queue: first the work of all owners is over, then the queue
/// waits for the futures that they hold, so `backward()` returns after them; a pass that the engine gives up
/// ends with Error{kCancelled}. Shared by the hooks of one owner. Thread-safe.
class NativeEnginePasses final : public std::enable_shared_from_this<NativeEnginePasses> {
 public:
  /// The sink of the pass whose node this thread is running. Throws Error{kInvalid} outside any.
  std::shared_ptr<GradFieldSink> current();
  /// From now on both give the same sinks, for owners that work on the gradients of one parameter: their
  /// callbacks then run one after the other. To be called while no pass runs.
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

/// What the owner of a hook does with the gradients of its parameter.
enum class GradientUse : std::uint8_t { kReads, kAverages, kSteps };

/// Tells its owner that a pass is done with one parameter: add it to the parameter's AccumulateGrad node as a
/// post hook. It is called once a pass that reaches the parameter, whichever engine drives it, after the
/// gradient went to the sink; the gradient may be missing (sink.gradient(parameter) is undefined).
class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(at::Tensor parameter, std::shared_ptr<NativeEnginePasses> passes)
      : parameter_(std::move(parameter)), passes_(std::move(passes)) {}
  /// On the thread that drives the pass; what it throws fails the pass.
  virtual void gradient_ready(GradientSink& sink, const at::Tensor& parameter) = 0;
  virtual GradientUse use() const { return GradientUse::kReads; }
  const std::shared_ptr<NativeEnginePasses>& passes() const { return passes_; }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) final;

 private:
  const at::Tensor parameter_;
  const std::shared_ptr<NativeEnginePasses> passes_;
};

/// The hooks at a parameter's leaf, in the order of their calls: who uses its gradients.
std::vector<GradientHook*> gradient_hooks(const at::Tensor& parameter);

/// Whether the pass of LibTorch's engine on this thread is to give a gradient to the parameter behind `leaf`,
/// its AccumulateGrad node: torch::autograd::grad() gives none, backward() with inputs those it was asked
/// for. True outside of LibTorch's passes.
bool pass_accumulates_at(torch::autograd::Node& leaf);

/// Tells its owner that a pass goes through a node that is no leaf: add it to the node as a pre hook. The
/// gradients pass unchanged.
class PassHook : public torch::autograd::FunctionPreHook {
 public:
  explicit PassHook(std::shared_ptr<NativeEnginePasses> passes) : passes_(std::move(passes)) {}
  /// Before the node runs, on the thread that drives the pass; what it throws fails the pass.
  virtual void pass_arrives(GradientSink& sink) = 0;

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) final;

 private:
  const std::shared_ptr<NativeEnginePasses> passes_;
};

}  // namespace torchspan::engine
