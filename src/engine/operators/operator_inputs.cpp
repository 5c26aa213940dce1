#include "engine/operators/operator_inputs.h"

#ifndef NDEBUG
#error "CMakeLists.txt defines NDEBUG for this source"
#endif

namespace torchspan::engine {

c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& function) { return function.inputs(); }

}  // namespace torchspan::engine
