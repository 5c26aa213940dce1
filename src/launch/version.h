#pragma once
#include <string>

namespace torchspan::launch {

/// Returns "0.1.0".
std::string version();

/// Returns what `torchspan version` prints: the version, then what this build uses, a line each.
std::string describe_version();

}  // namespace torchspan::launch
