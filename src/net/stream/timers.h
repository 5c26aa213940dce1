#pragma once
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include <torchspan/core/time.h>

namespace torchspan::net {

/// Timers of connections and listening sockets, at most one per token. For the driver.
class Timers {
 public:
  /// Starts the token's timer anew, or stops it if `when` is nullopt. A timer at TimePoint::max() never fires.
  void set(std::uint64_t token, std::optional<TimePoint> when);
  /// When the token's timer fires; nullopt if it has none.
  std::optional<TimePoint> of(std::uint64_t token) const;
  /// When the next timer fires.
  Deadline next() const;
  /// Removes a timer that fired by `now` and returns its token; nullopt if none did.
  std::optional<std::uint64_t> take_due(TimePoint now);

 private:
  std::set<std::pair<TimePoint, std::uint64_t>> queue_;
  std::unordered_map<std::uint64_t, TimePoint> times_;
};

}  // namespace torchspan::net
