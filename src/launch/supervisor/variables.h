#pragma once
#include <string>

#include <torchspan/rendezvous.h>

namespace torchspan::launch {

/// The value of a variable; empty if it is not set.
inline std::string value_of(const rendezvous::Environment& environment, const std::string& name) {
  const auto found = environment.find(name);
  return found == environment.end() ? std::string() : found->second;
}

}  // namespace torchspan::launch
