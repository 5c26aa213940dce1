#pragma once
#include <atomic>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// A transport whose sleep can be part of the sleep of another transport, which contains several: that one
/// prepares each, sleeps until one of the descriptors is readable, and ends the sleep of each. For the
/// driver.
class PolledTransport : public Transport {
 public:
  /// Prepares a sleep until `until`, which it may make earlier. Returns false if there is work already.
  /// end_sleep() must follow in both cases.
  virtual bool prepare_sleep(Deadline& until) = 0;
  /// `ready`: the descriptor was readable, so the next poll() polls every socket.
  virtual void end_sleep(bool ready) = 0;
  virtual int descriptor() const = 0;
};

/// Draws the numbers that identify the connections and listening sockets of one transport. Thread-safe.
class TokenCounter {
 public:
  /// Returns a number that no earlier call returned.
  std::uint64_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> next_{1};
};

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

/// What the objects that drive one transport over sockets have in common. The transport owns all of it, and
/// these objects.
struct DriverContext {
  Executor& executor;
  Handler& handler;
  const TransportOptions& options;
  Poller& poller;
  TokenCounter& tokens;
  Timers& timers;
};

}  // namespace torchspan::net
