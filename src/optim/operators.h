#pragma once
#include <cstdint>
#include <limits>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

namespace torchspan::optim {

/// Whether kernels for lists of tensors may take the tensor, complex numbers as pairs: those of some releases index its
/// elements with int.
inline bool can_index_with_int(const at::Tensor& tensor) {
  return tensor.numel() <= std::numeric_limits<std::int32_t>::max() / (tensor.is_complex() ? 2 : 1);
}

/// The operator, as in "aten::_fused_adam_", or nothing if this LibTorch lacks it, or a kernel for the device of `like`,
/// a dense tensor. A fallback for all operators, as some devices have, does not count.
inline auto find_operator(const char* name, const at::Tensor& like) {
  auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  if (found && !found->hasKernelForDispatchKey(like.options().computeDispatchKey())) found.reset();
  return found;
}

/// Whether find_operator() returns it.
inline bool has_operator(const char* name, const at::Tensor& like) {
  return find_operator(name, like).has_value();
}

/// Calls an operator that some LibTorch releases or devices lack. Returns false, and changes nothing, without a kernel
/// for the device of `like`, and if the kernel throws c10::NotImplementedError. Pass only dtypes that the kernels of
/// all releases have: for others, old releases throw a c10::Error that says nothing about its cause.
template <class Signature, class... Arguments>
[[nodiscard]] bool call_operator(const char* name, const at::Tensor& like, Arguments&&... arguments) {
  const auto found = find_operator(name, like);
  if (!found) return false;
  try {
    found->template typed<Signature>().call(std::forward<Arguments>(arguments)...);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  return true;
}

}  // namespace torchspan::optim
