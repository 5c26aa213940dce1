#pragma once
#include <cstdint>
#include <map>
#include <set>

#include <torchspan/core/time.h>

namespace torchspan::rpc {

/// Decides which functions declared kInline still run on the receiving thread: a function that takes long
/// moves to the pool. Its user guards it: is_short() and move_to_pool() by the driver lock; only one thread
/// calls ran().
class InlinePolicy {
 public:
  bool is_short(std::uint64_t function) const { return !long_functions_.contains(function); }
  /// Counts a run. Returns true if the function has now run too long too often.
  bool ran(std::uint64_t function, Duration took);
  /// Moves the function to the pool. Returns false if it has moved before.
  bool move_to_pool(std::uint64_t function) { return long_functions_.insert(function).second; }

 private:
  std::map<std::uint64_t, int> long_runs_;
  std::set<std::uint64_t> long_functions_;
};

}  // namespace torchspan::rpc
