#include "collective/dtypes.h"

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

namespace torchspan::collective {

std::string name_of_dtype(std::int8_t dtype) {
  const bool known = dtype >= 0 && dtype < static_cast<std::int8_t>(at::ScalarType::NumOptions);
  return known ? c10::toString(static_cast<at::ScalarType>(dtype)) : std::to_string(dtype);
}

bool loses_nan(at::ScalarType dtype, ReduceOp reduction) {
  return at::isFloatingType(dtype) && (reduction == kMin || reduction == kMax);
}

}  // namespace torchspan::collective
