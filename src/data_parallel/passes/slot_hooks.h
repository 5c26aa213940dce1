#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include "data_parallel/buckets/buckets.h"
#include "data_parallel/passes/parameter_slots.h"
#include "engine/api/grad_field_sink.h"
#include "engine/api/node_ptr.h"

namespace torchspan::data_parallel {

/// Receives the gradients of a reducer's parameters, on the thread that runs the backward pass.
class SlotListener {
 public:
  virtual ~SlotListener() = default;
  /// The pass has finished the gradient of a slot, which may be undefined. An exception fails the pass.
  virtual void gradient_ready(engine::GradientSink& sink, std::size_t slot) = 0;
  /// gradient_ready() threw an exception with this text. LibTorch's engine does not pass the text on.
  virtual void gradient_failed(const std::string& text) = 0;
  /// Whether a reduction takes gradients now.
  virtual bool is_reducing() const = 0;
  /// Whether the pass came through an output of this listener's wrapper, reduced or under no_sync.
  virtual bool expects_gradients(const engine::GradientSink& sink) const = 0;
  /// Global ranks over which gradients are averaged.
  virtual const std::vector<int>& ranks() const = 0;
};

/// Throws Error{kInvalid} if an optimizer steps the parameter during backward, which consumes its gradient
/// before it is averaged.
void check_not_stepped_in_backward(const Parameter& parameter);

/// The hooks of one reducer on its parameters' gradient accumulators. attach(), attach_again() and detach()
/// run between passes, the other methods during passes too.
class SlotHooks {
 public:
  explicit SlotHooks(const ParameterSlots& slots) : slots_(slots) {}
  SlotHooks(const SlotHooks&) = delete;
  SlotHooks& operator=(const SlotHooks&) = delete;

  /// Adds a hook to every parameter, once. Throws Error{kInvalid} for a parameter that is stepped in backward.
  void attach(const std::shared_ptr<SlotListener>& listener);
  /// Adds hooks to parameters that lost them with their gradient accumulators, as torch::load() makes them.
  void attach_again(const Buckets& buckets);
  void detach();

  /// Passes of LibTorch's engine, shared with the other users of these parameters' gradients.
  const std::shared_ptr<engine::NativeEnginePasses>& passes() const { return passes_; }
  /// Whether the pass on this thread accumulates a gradient in any of the parameters.
  bool pass_reaches_parameters() const;
  /// Whether another reducer also averages the slot's gradient. Throws Error{kInvalid} if that reducer does
  /// so in this pass over other ranks.
  bool is_shared(std::size_t slot) const;
  /// Whether another reducer over the same ranks expects the slot's gradient in this pass.
  bool is_expected_elsewhere(std::size_t slot, const engine::GradientSink& sink) const;
  /// Names of slots without a gradient, with the reason if no pass can reach one of them.
  std::string describe_missing(const std::vector<std::size_t>& slots) const;

 private:
  void add_hook(std::size_t slot);
  /// Why no pass can reach the slot; empty if one can.
  std::string why_unreachable(std::size_t slot) const;

  const ParameterSlots& slots_;
  const std::shared_ptr<engine::NativeEnginePasses> passes_ = std::make_shared<engine::NativeEnginePasses>();
  std::weak_ptr<SlotListener> listener_;
  std::vector<std::pair<engine::NodePtr, std::uintptr_t>> hooked_;  // by slot
};

}  // namespace torchspan::data_parallel
