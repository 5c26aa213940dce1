#pragma once
// All differences between the supported LibTorch versions (1.13 to 2.x) that concern autograd.
#include <cstddef>
#include <optional>
#include <string_view>
#include <typeinfo>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "device/api/compat.h"
#include "device/api/torch_version.h"

namespace torchspan::engine::compat {

using torch::autograd::AccumulateGrad;
using torch::autograd::InputMetadata;
using torch::autograd::Node;
using torch::autograd::variable_list;

using device::compat::sparse_impl;

/// The dtype that a node expects for the gradient of one of its inputs; nullopt: any.
inline std::optional<at::ScalarType> gradient_dtype(const InputMetadata& metadata) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 10)
  return metadata.grad_dtype();
#else
  return c10::typeMetaToScalarType(metadata.dtype());
#endif
}

/// The input whose tensor a hook was registered for; nullopt for a hook of the whole node. LibTorch does not
/// export the type's identity, so this compares its name.
inline std::optional<std::size_t> input_of(const torch::autograd::FunctionPreHook& hook) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 0)
  using OfTensor = torch::autograd::CppFunctionTensorPreHook;
  constexpr std::string_view kName = "N5torch8autograd24CppFunctionTensorPreHookE";
#else
  using OfTensor = torch::autograd::CppFunctionPreHook;
  constexpr std::string_view kName = "N5torch8autograd18CppFunctionPreHookE";
#endif
  if (typeid(hook).name() != kName) return std::nullopt;
  return static_cast<std::size_t>(static_cast<const OfTensor&>(hook).value_idx_);
}

/// Whether LibTorch's code generator wrote the node's class: it then computes nothing but its gradients, and only
/// those for which it has an edge. LibTorch does not export the types' identities, so this compares the name.
inline bool is_generated(const Node& node) {
  return std::string_view(typeid(node).name()).starts_with("N5torch8autograd9generated");
}

/// Runs the hooks on a node's input gradients in LibTorch's order, each through `call`, and returns the
/// resulting gradients: from 2.0 on, the tensor hooks and retain_grad's hook; then the node's pre-hooks.
template <class Call>
variable_list run_pre_hooks(Node& node, variable_list gradients, const Call& call) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 0)
  for (const auto& hook : node.tensor_pre_hooks()) gradients = call(*hook, gradients);
  for (const auto& [input, hook] : node.retains_grad_hooks()) gradients = call(*hook, gradients);
#endif
  for (const auto& hook : node.pre_hooks()) gradients = call(*hook, gradients);
  return gradients;
}

/// Runs the tensor hooks of a leaf that run_pre_hooks() does not run: before 2.0, AccumulateGrad ran them.
inline at::Tensor run_leaf_hooks(const AccumulateGrad& node, at::Tensor gradient) {
#if !TORCHSPAN_LIBTORCH_AT_LEAST(2, 0)
  if (gradient.defined()) gradient = AccumulateGrad::callHooks(node.variable, std::move(gradient));
#endif
  return gradient;
}

/// Whether LibTorch calls hooks after the accumulation also for leaves to which nothing was added.
inline constexpr bool kPostAccumulateHooksAlwaysRun = TORCHSPAN_LIBTORCH_AT_LEAST(2, 7);

/// Runs the hook that LibTorch 2.1 and later call when `.grad` holds the sum.
inline void run_post_accumulate_hook(AccumulateGrad& node, bool accumulated) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 1)
  if (!accumulated && !kPostAccumulateHooksAlwaysRun) return;
  if (const auto& hook = node.tensor_post_acc_grad_hooks()) (*hook)(node.variable);
#endif
}

}  // namespace torchspan::engine::compat
