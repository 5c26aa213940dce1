#pragma once
#include <cstdint>
#include <map>
#include <set>

#include <torchspan/core/time.h>

namespace torchspan::rpc {

/// Decides which functions declared kInline still run on the receiving thread: one that takes long moves to
/// the pool. Guarded by its user: is_short() and move_to_pool() by the driver lock, ran() by one thread.
class InlinePolicy {
 public:
  bool is_short(std::uint64_t function) const { return !long_functions_.contains(function); }
  /// Counts a run. True if the function has now run too long too often.
  bool ran(std::uint64_t function, Duration took);
  /// False if it has moved before.
  bool move_to_pool(std::uint64_t function) { return long_functions_.insert(function).second; }

 private:
  std::map<std::uint64_t, int> long_runs_;
  std::set<std::uint64_t> long_functions_;
};

}  // namespace torchspan::rpc
