#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::autograd {

/// Throws Error{kInvalid} about root `index` of a backward(): "backward(): root 1 is undefined".
[[noreturn]] void refuse_root(std::size_t index, const std::string& why);
/// Throws if `root` is undefined or does not require grad.
void check_root(std::size_t index, const at::Tensor& root);

/// Reduces roots of any shape to one scalar whose backward gives each root its gradient. An undefined
/// gradient means 1 and requires a scalar root. Throws Error{kInvalid} naming the root that cannot be
/// differentiated or whose gradient does not match.
at::Tensor scalar_of(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients);

}  // namespace torchspan::autograd
