#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "optim/functional/fused_kernels.h"
#include "optim/functional/operands.h"

namespace torchspan::optim {

/// Applies `step` (fused_kernels.h) in one pass over memory, on LibTorch's threads if the tensors are large, and
/// creates slots that are undefined. Returns false, and changes nothing, unless parameter and slots are on the
/// CPU, of one dtype (float or double), and dense in the same memory format. A gradient of another memory
/// format, or one that shares memory with the others, is copied first.
template <class Step>
[[nodiscard]] bool fused_step(const Step& step, const Operands<at::Tensor>& on);

struct Adam;
struct AdamW;
struct SGD;

/// Whether LibTorch has a fused operator for an optimizer with these options on the device of `like`.
bool has_fused_operator(const Adam& options, const at::Tensor& like);
bool has_fused_operator(const AdamW& options, const at::Tensor& like);
bool has_fused_operator(const SGD& options, const at::Tensor& like);
template <class Options>
bool has_fused_operator(const Options&, const at::Tensor&) {
  return false;
}

/// Steps all parameters with LibTorch's fused operator, which reads and writes each element once, and creates slots
/// that are undefined. Does not wait for the device. Returns false, and changes nothing, if LibTorch has none for
/// this device and dtype, or if a parameter or slot has gaps in memory. A gradient of another memory format, or one
/// that shares memory with parameters or slots, is copied first.
[[nodiscard]] bool run_fused_operator(const Adam& options, const Operands<Tensors>& on);
[[nodiscard]] bool run_fused_operator(const AdamW& options, const Operands<Tensors>& on);
[[nodiscard]] bool run_fused_operator(const SGD& options, const Operands<Tensors>& on);
template <class Options>
[[nodiscard]] bool run_fused_operator(const Options&, const Operands<Tensors>&) {
  return false;
}

}  // namespace torchspan::optim
