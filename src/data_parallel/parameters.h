#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/data_parallel/reducer.h>

#include "data_parallel/api/agreement.h"
#include "data_parallel/buckets.h"
#include "engine/api/grad_field_sink.h"
#include "engine/api/node_ptr.h"

namespace torchspan::data_parallel {

/// What all ranks must have in common before they construct a reducer, or why this rank cannot construct it.
Agreement reducer_agreement(const Reducer::Replicas& replicas, const DataParallelOptions& options,
                            const collective::Group& group);

/// The parameters whose gradients one reducer averages. A slot is one parameter of one replica:
/// replica · count() + parameter. Immutable.
class ParameterSlots {
 public:
  /// Keeps the parameters that require gradients, and a list of the others of the first replica.
  explicit ParameterSlots(const Reducer::Replicas& replicas);

  /// Number of slots.
  std::size_t size() const { return replicas_.size() * count_; }
  /// Number of parameters per replica.
  std::size_t count() const { return count_; }
  const Reducer::Replicas& replicas() const { return replicas_; }
  const at::Tensor& tensor(std::size_t slot) const { return replicas_[slot / count_][slot % count_].tensor; }
  const std::string& name(std::size_t slot) const { return replicas_[slot / count_][slot % count_].name; }
  /// Quoted names for a message, the first ten in full.
  std::string names(const std::vector<std::size_t>& slots) const;
  /// Slots that the graphs of `outputs` do not reach.
  std::vector<std::size_t> unreached_from(const std::vector<at::Tensor>& outputs) const;
  /// Throws Error{kInvalid} if a parameter that required no gradient at construction requires one now.
  void check_frozen() const;

 private:
  const Reducer::Replicas replicas_;
  const std::size_t count_;
  std::vector<Parameter> frozen_;  // the first replica's other parameters
  std::unordered_map<const c10::TensorImpl*, std::size_t> slot_of_;
};

/// The hooks of one reducer on its parameters' gradient accumulators. attach(), attach_again() and detach()
/// run between passes, the other methods during passes too.
class SlotHooks {
 public:
  explicit SlotHooks(const ParameterSlots& slots) : slots_(slots) {}
  SlotHooks(const SlotHooks&) = delete;
  SlotHooks& operator=(const SlotHooks&) = delete;

  /// Adds a hook to every parameter, once. Throws Error{kInvalid} for a parameter that is stepped in backward.
  void attach(const std::weak_ptr<Reducer::Impl>& reducer);
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
  std::weak_ptr<Reducer::Impl> reducer_;
  std::vector<std::pair<engine::NodePtr, std::uintptr_t>> hooked_;  // by slot
};

}  // namespace torchspan::data_parallel
