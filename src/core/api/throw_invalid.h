#pragma once
#include <fmt/format.h>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan {

/// Throws Error{kInvalid} with the formatted text.
template <class First, class... Rest>
[[noreturn]] void throw_invalid(fmt::format_string<First, Rest...> format, First&& first, Rest&&... rest) {
  throw_invalid(fmt::vformat(format, fmt::make_format_args(first, rest...)));
}

}  // namespace torchspan
