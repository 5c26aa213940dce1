#pragma once
#include <cstdint>
#include <string>

#include <c10/core/ScalarType.h>

#include <torchspan/collective/backend.h>

namespace torchspan::collective {

/// Returns LibTorch's name of a dtype number ("Float"), or the number if it has no name.
std::string name_of_dtype(std::int8_t dtype);
/// Whether the reductions of Gloo, MPI and NCCL give a NaN or not, depending on the rank that has it. Ours, like at::minimum(),
/// always give it.
bool loses_nan(at::ScalarType dtype, ReduceOp reduction);

}  // namespace torchspan::collective
