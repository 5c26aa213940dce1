#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

namespace torchspan::engine {

/// Returns the inputs of an operator, within the callback of its beginning. RecordFunction::inputs() asserts a flag in
/// debug builds that LibTorch sets only if it was compiled as a debug build itself; this compiles without the assertion.
c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& function);

}  // namespace torchspan::engine
