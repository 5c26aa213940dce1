#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::autograd {

/// Refuses root `index` of a backward() with Error{kInvalid}: "backward(): root 1 is undefined".
[[noreturn]] void refuse_root(std::size_t index, const std::string& why);
/// Refuses what no pass can begin from, whatever its shape.
void check_root(std::size_t index, const at::Tensor& root);

/// A scalar whose backward gives each root its gradient: roots of any shape as one loss. An undefined
/// gradient means 1, for a scalar. Throws Error{kInvalid} that names the root which cannot be differentiated
/// or whose gradient does not fit.
at::Tensor scalar_of(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients);

}  // namespace torchspan::autograd
