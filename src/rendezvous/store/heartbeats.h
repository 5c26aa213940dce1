#pragma once
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
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

  void watch(std::uint64_t connection, TimePoint now);
  void forget(std::uint64_t connection);
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
  using Times = std::set<std::pair<TimePoint, std::uint64_t>>;

  const Options options_;
  std::unordered_map<std::uint64_t, Peer> peers_;
  Times to_ask_;      ///< Peer::ask_at and connection
  Times unanswered_;  ///< Peer::asked_since and connection
};

}  // namespace torchspan::rendezvous
