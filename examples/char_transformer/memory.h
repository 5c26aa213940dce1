#pragma once
#include <cstdint>

namespace char_transformer {

/// Limits the private memory of this process to so many MiB more than it has; 0: no limit. Memory that ranks share does
/// not count. Throws torchspan::Error{kUnsupported} if the system has no such limit.
void limit_memory(std::int64_t mib);
/// The largest memory that this process has had, in MiB.
std::int64_t largest_memory();

}  // namespace char_transformer
