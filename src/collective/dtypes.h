#pragma once
#include <cstdint>
#include <string>

namespace torchspan::collective {

/// LibTorch's name of a dtype by its number ("Float"), or the number if there is none.
std::string name_of_dtype(std::int8_t dtype);

}  // namespace torchspan::collective
