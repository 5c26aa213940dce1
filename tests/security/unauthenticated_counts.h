#pragma once
#include <atomic>
#include <cstdint>

#include <torchspan/core/time.h>

namespace torchspan::net::conformance {

/// How long the victim waits for a handshake to end.
inline constexpr Duration kVictimPatience = std::chrono::milliseconds(500);

/// What the victim's transports reported about callers.
struct VictimCounts {
  std::atomic<std::uint64_t> accepted{0};
  std::atomic<std::uint64_t> refused{0};
  std::atomic<std::uint64_t> denied{0};      ///< of the refused
  std::atomic<std::uint64_t> overloaded{0};  ///< the same
};

}  // namespace torchspan::net::conformance
