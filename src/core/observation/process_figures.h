#pragma once
#include <cstdint>

namespace torchspan {

/// Resident memory of this process in bytes; 0 if unknown.
std::uint64_t resident_bytes();
/// Processor time of all threads of this process, in seconds.
double processor_seconds();

}  // namespace torchspan
