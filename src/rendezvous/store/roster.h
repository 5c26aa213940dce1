#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torchspan/core/time.h>

#include "rendezvous/messages/messages.h"

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

/// What the store announces to all workers, as a log in which each worker has a place. A worker gets the
/// changes since its place in one message: at once if none were announced recently, otherwise after
/// `per_worker` times the number of workers, or before the next other message to it. So a burst of changes
/// costs each worker one message, not one per change. A table without I/O or clock, for one thread at a time.
class Announcements {
 public:
  struct Options {
    Duration per_worker = std::chrono::microseconds(10);  ///< zero: announces every change by itself
    Duration most = std::chrono::milliseconds(50);
  };
  explicit Announcements(Options options) : options_(options) {}

  /// The place of a worker that knows everything so far.
  std::uint64_t end() const { return begin_ + log_.size(); }
  void add(Changes::Change change);
  /// The changes since `place`, which becomes end(); null if there are none.
  SharedBytes take_since(std::uint64_t& place);
  /// Whether changes wait, and may be sent now.
  bool due(TimePoint now) const { return waiting_ && now >= not_before_; }
  /// When due() may become true; never if nothing waits.
  Deadline next_deadline() const { return waiting_ ? Deadline(not_before_) : Deadline::never(); }
  /// All of `workers` workers have got all changes.
  void all_sent(TimePoint now, std::size_t workers);
  bool batches() const { return options_.per_worker > Duration::zero(); }

 private:
  const Options options_;
  std::deque<Changes::Change> log_;
  std::uint64_t begin_ = 0;  ///< place of the first entry
  bool waiting_ = false;
  TimePoint not_before_ = TimePoint::min();
  std::uint64_t encoded_from_ = 0, encoded_to_ = 0;
  SharedBytes encoded_;  ///< of the entries between these places
};

/// The function tables and wire versions of the present workers: one copy of each distinct table, and which workers
/// have it. For one thread at a time.
class FunctionTables {
 public:
  /// A worker with this registration came or is gone.
  void add(const Register& registration);
  void remove(const Register& registration);
  /// Why a worker with this registration may not join the present ones; nullopt if it may. `describe` formats
  /// the worker of a rank.
  std::optional<Error> difference(const Register& message,
                                  const std::function<std::string(int rank)>& describe) const;

 private:
  /// Digest of the functions; oldest and newest version, and features, of the wire format.
  using Key = std::tuple<std::uint64_t, std::uint16_t, std::uint16_t, std::uint32_t>;
  struct Table {
    std::vector<std::string> functions;
    ProtocolRange wire;
    std::set<int> holders;         ///< their ranks
    std::size_t require_same = 0;  ///< how many holders require the same table of all
  };
  static Key key_of(const Member& member);
  std::map<Key, Table> tables_;
};

using ConnectionId = std::uint64_t;

/// The workers of a store: the latest holder of every rank, present or gone, by rank, name and connection.
/// For one thread at a time.
class Roster {
 public:
  struct Worker {
    Register registration;                        ///< without its functions, which FunctionTables has
    std::optional<ConnectionId> connection = {};  ///< none once it left or died
    bool died = false;                            ///< else it left
    std::string how = {};                         ///< it died; see Departed::how
    std::uint64_t told = 0;                       ///< its place in the announcements
    const Member& member() const { return registration.member; }
  };
  using Workers = std::map<int, Worker>;

  const Workers& all() const { return workers_; }
  Workers& all() { return workers_; }
  bool contains(int rank) const { return workers_.contains(rank); }
  Worker& at(int rank) { return workers_.at(rank); }
  const Worker& at(int rank) const { return workers_.at(rank); }
  /// Null if no worker has held the rank, or had the name last.
  const Worker* find(int rank) const;
  const Worker* find(const std::string& name) const;
  std::optional<int> rank_of(ConnectionId connection) const;
  std::size_t present() const { return ranks_.size(); }
  /// The rank for a worker that may ask for any.
  int rank_for(const Member& member);
  std::optional<Error> difference_of_functions(const Register& message) const;

  /// The worker takes its rank, perhaps after another one.
  Worker& enter(ConnectionId connection, Register message);
  /// A present worker left or died.
  void leave(Worker& worker);

 private:
  Workers workers_;
  std::map<ConnectionId, int> ranks_;  ///< of the present workers
  std::map<std::string, int> names_;   ///< of workers_
  FunctionTables functions_;           ///< of the present workers
  int unused_rank_ = 1;                ///< lower ranks, except 0, have been used
};

}  // namespace torchspan::rendezvous
