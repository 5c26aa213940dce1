#pragma once
#include "optim/functional/fused_kernels.h"
#include "optim/functional/operands.h"

namespace torchspan::optim {

/// Applies `step` (fused_kernels.h) in one pass over memory, on LibTorch's threads if the tensors are large, and
/// creates slots that are undefined. Returns false, and changes nothing, unless parameter and slots are on the
/// CPU, of one dtype (float or double), and dense in the same memory format. A gradient of another memory
/// format, or one that shares memory with the others, is copied first.
template <class Step>
[[nodiscard]] bool fused_step(const Step& step, const Operands<at::Tensor>& on);

}  // namespace torchspan::optim
