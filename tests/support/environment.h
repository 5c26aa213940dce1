#pragma once
#include <concepts>
#include <cstdlib>

namespace torchspan::testing {

/// Returns the number in an environment variable; `otherwise` if it is not set.
template <std::integral Number>
Number number_from(const char* variable, Number otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : static_cast<Number>(std::strtoull(text, nullptr, 10));
}

}  // namespace torchspan::testing
