#pragma once
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

namespace torchspan::optim {

/// Whether this LibTorch has the operator, as in "aten::_fused_adam_", and a kernel for the device of `like`, a dense
/// tensor. A fallback for all operators, as some devices have, does not count.
inline bool has_operator(const char* name, const at::Tensor& like) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  return found && found->hasKernelForDispatchKey(like.options().computeDispatchKey());
}

/// Calls an operator that some LibTorch releases or devices lack. Returns false, and changes nothing, without a kernel
/// for the device of `like`, and if the kernel throws c10::NotImplementedError, for example because of the dtype.
template <class Signature, class... Arguments>
[[nodiscard]] bool call_operator(const char* name, const at::Tensor& like, Arguments&&... arguments) {
  if (!has_operator(name, like)) return false;
  try {
    c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>().call(
        std::forward<Arguments>(arguments)...);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  return true;
}

}  // namespace torchspan::optim
