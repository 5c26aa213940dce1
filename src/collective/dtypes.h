#pragma once
#include <cstdint>
#include <string>

namespace torchspan::collective {

/// Returns LibTorch's name of a dtype number ("Float"), or the number if it has no name.
std::string name_of_dtype(std::int8_t dtype);

}  // namespace torchspan::collective
