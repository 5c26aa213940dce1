#pragma once
#include <atomic>
#include <cstdint>

namespace torchspan::net {

/// Draws the numbers that identify the connections and listening sockets of one transport. Thread-safe.
class TokenCounter {
 public:
  /// Returns a number that no earlier call returned.
  std::uint64_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> next_{1};
};

}  // namespace torchspan::net
