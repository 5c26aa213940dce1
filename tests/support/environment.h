#pragma once
#include <cstdlib>

namespace torchspan::testing {

/// The number that an environment variable holds; `otherwise` when it is not set.
inline long number_from(const char* variable, long otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atol(text);
}

}  // namespace torchspan::testing
