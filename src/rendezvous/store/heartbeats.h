#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan::rendezvous {

/// "silent for 5.0 s (no heartbeat); its host or the network may be down"
std::string silence_text(Duration silence);

/// Which workers to ask for a heartbeat, and which have been silent for too long: a table without I/O or
/// clock. Time counts from the first request without an answer, so a store that was stopped itself declares
/// no worker dead. For one thread at a time.
class Heartbeats {
 public:
  struct Options {
    Duration interval = std::chrono::milliseconds(500);
    Duration dead_after = std::chrono::seconds(5);
  };
  struct Due {
    std::vector<std::uint64_t> ask, dead;
  };
  explicit Heartbeats(Options options) : options_(options) {}

  void watch(std::uint64_t connection, TimePoint now) { peers_[connection] = {now, std::nullopt}; }
  void forget(std::uint64_t connection) { peers_.erase(connection); }
  /// Any message counts.
  void heard(std::uint64_t connection);
  /// Which connections to ask now, and which are dead; removes the dead ones.
  Due tick(TimePoint now);
  Deadline next_deadline() const;
  const Options& options() const { return options_; }

 private:
  struct Peer {
    TimePoint ask_at;
    std::optional<TimePoint> asked_since;  ///< time of the first request without an answer
  };
  const Options options_;
  std::map<std::uint64_t, Peer> peers_;
};

}  // namespace torchspan::rendezvous
