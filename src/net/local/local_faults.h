#pragma once
#include <cstdint>
#include <functional>

namespace torchspan::net {

/// System calls of the local transport that may fail.
enum class LocalStep : std::uint8_t {
  kMakeMemory,      ///< create a memory file
  kReserveMemory,   ///< allocate its pages
  kMapMemory,       ///< map it, this side's or the peer's
  kPassDescriptor,  ///< send it to the peer
  kTakeDescriptor,  ///< receive one from the peer
};

/// Decides for tests which of these calls fail: true fails the step. Called on any thread; empty in programs.
using LocalFaults = std::function<bool(LocalStep)>;

inline bool fails(const LocalFaults& faults, LocalStep step) { return faults && faults(step); }

}  // namespace torchspan::net
