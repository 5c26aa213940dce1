#pragma once
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/metrics.h>

#include "rendezvous/first_death.h"
#include "rendezvous/messages/messages.h"
#include "rendezvous/store/roster.h"
#include "rendezvous/store/rounds.h"

namespace torchspan::rendezvous {

struct StoreOptions {
  int world_size = 1;  ///< or kOpenWorld
  std::string job;
  std::string host_id = {};  ///< of rank 0; workers on other hosts are asked for heartbeats
  Heartbeats::Options heartbeats = {};
  /// Called with the times of each answered heartbeat; may be empty.
  std::function<void(const ClockSample&)> on_clock_sample = {};
  Announcements::Options announcements = {};
  ProtocolRange versions = kStoreProtocol;
};

/// The service of rank 0, as a table without I/O or clock: messages and ends of connections in, messages out.
/// A fixed world gathers first; an invalid registration, or the first deadline, fails it for all workers.
/// Then it runs: the store announces deaths and goodbyes, serves rounds, and admits a worker in place of one
/// that died. An open world runs as soon as rank 0 has joined. For one thread at a time.
class Store {
 public:
  /// How the table uses its connections; close() delivers what was sent before.
  struct Connections {
    std::function<void(ConnectionId, SharedBytes)> send;
    std::function<void(ConnectionId)> close;
  };
  Store(StoreOptions options, Connections connections);

  /// Throws Error{kInvalid} for bytes that are not a message of this phase; the caller closes the connection.
  void on_message(ConnectionId connection, BytesView bytes, TimePoint now);
  void on_closed(ConnectionId connection, const Error& reason, TimePoint now);
  void tick(TimePoint now);
  Deadline next_deadline() const;
  /// Whether no worker needs the store: all left or died; or, if the world failed, no rank still waits for
  /// the reason and all refused connections are closed.
  bool is_finished() const;
  /// The ranks for which a fixed world waits before it runs; empty otherwise.
  std::vector<int> missing() const;
  /// The workers that joined and have neither left nor died.
  std::vector<const Member*> present() const;

 private:
  enum class Phase { kGathering, kRunning, kFailed };
  using Worker = Roster::Worker;

  void on_register(ConnectionId connection, Register message, TimePoint now);
  void on_leave(ConnectionId connection, TimePoint now);
  void on_give_up(ConnectionId connection, const std::string& why, TimePoint now);
  bool is_open() const { return options_.world_size == kOpenWorld; }
  std::optional<Error> rejection_reason(const Register& message) const;
  std::optional<Error> reason_to_fail(const Register& message) const;
  /// Why the world, which ends soon, admits no more workers.
  std::optional<Error> retry_reason(const Register& message) const;
  std::optional<Error> admission_error(const Register& message) const;
  std::optional<Error> reason_in_an_open_world(const Register& message) const;
  std::optional<Error> reason_in_a_complete_world(const Register& message) const;
  void gather(ConnectionId connection, Register message, TimePoint now);
  void admit(ConnectionId connection, Register message);
  Welcome make_welcome() const;
  void report_end(ConnectionId connection, const std::string& cause, TimePoint now);
  /// Of a running world; see Departed::how.
  void end_of(int rank, const std::string& how, TimePoint now);
  void fail(const Error& reason);
  void refuse(ConnectionId connection, const Error& reason, bool passing = false);
  void welcome_all();
  void announce(Changes::Change change);
  /// Sends the announcements that `worker` has not got.
  void catch_up(Worker& worker);
  void catch_up_all(TimePoint now);
  Error missing_workers() const;
  int rank_of(ConnectionId connection) const;

  const StoreOptions options_;
  const Connections connections_;
  MessageTable<ConnectionId, TimePoint> messages_;
  Rounds rounds_;
  Heartbeats heartbeats_;
  Announcements announcements_;
  FirstDeath first_death_;
  Phase phase_;
  Roster roster_;
  std::vector<std::pair<ConnectionId, Register>> waiting_;  ///< registered in an open world before rank 0
  std::set<ConnectionId> refused_;                          ///< got the reason, not closed yet
  std::set<ConnectionId> silent_;                           ///< declared dead, not closed yet
  std::set<int> informed_;  ///< ranks that got the reason why the world failed
  Deadline gather_until_;
  std::optional<Error> failure_;
  std::string rejection_;  ///< why the last worker with an unknown rank was refused; empty: none was
};

}  // namespace torchspan::rendezvous
