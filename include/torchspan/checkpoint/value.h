#pragma once
#include <cstdint>
#include <string>
#include <variant>

namespace torchspan::checkpoint {

/// A number, flag or text of the program that a checkpoint stores in its manifest.
using Value = std::variant<bool, std::int64_t, double, std::string>;

}  // namespace torchspan::checkpoint
