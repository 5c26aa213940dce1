#pragma once
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "rendezvous/heartbeats.h"
#include "rendezvous/messages.h"
#include "rendezvous/rounds.h"

namespace torchspan::rendezvous {

using ConnectionId = std::uint64_t;

struct StoreOptions {
  int world_size = 1;  ///< or kOpenWorld
  std::string job;
  std::string host_id = {};  ///< of rank 0: workers of other hosts are asked for signs of life
  Heartbeats::Options heartbeats = {};
};

/// What rank 0 serves, as a table without I/O or clock: messages and ends of connections in, messages out.
/// A fixed world gathers first; a registration that cannot be, or the first deadline, fails it for everybody.
/// Then it runs: deaths and good-byes are announced, rounds are held, and who comes in the place of a gone
/// worker is let in. An open world runs from the moment rank 0 is in. One thread at a time.
class Store {
 public:
  /// How the table acts on its connections; close() lets what was sent before arrive.
  struct Connections {
    std::function<void(ConnectionId, Bytes)> send;
    std::function<void(ConnectionId)> close;
  };
  Store(StoreOptions options, Connections connections);

  /// Throws Error{kInvalid} for bytes that are no message of this phase: close the connection.
  void on_message(ConnectionId connection, BytesView bytes, TimePoint now);
  void on_closed(ConnectionId connection, const Error& reason);
  void tick(TimePoint now);
  Deadline next_deadline() const;
  /// Whether nobody needs it any more: all left or died; or, when the world failed, all who came were told
  /// and closed, and nobody who has not come will miss the news.
  bool deserted() const;
  /// The workers that are in and neither left nor died.
  std::vector<const Member*> present() const;

 private:
  enum class Phase { kGathering, kRunning, kFailed };
  struct Worker {
    Register registration;
    std::optional<ConnectionId> connection = {};  ///< none once it left or died
    bool died = false;                            ///< else it left
    std::string story = {};                       ///< of its death: a sentence
    const Member& member() const { return registration.member; }
  };

  void on_register(ConnectionId connection, Register message, TimePoint now);
  void on_leave(ConnectionId connection);
  void on_give_up(ConnectionId connection, const std::string& why);
  bool is_open() const { return options_.world_size == kOpenWorld; }
  std::optional<Error> reason_to_turn_away(const Register& message) const;
  std::optional<Error> reason_to_fail(const Register& message) const;
  /// The world is about to end, and will not take anybody in.
  std::optional<Error> reason_to_come_later(const Register& message) const;
  std::optional<Error> reason_to_keep_out(const Register& message) const;
  std::optional<Error> reason_in_an_open_world(const Register& message) const;
  std::optional<Error> reason_in_a_complete_world(const Register& message) const;
  std::optional<Error> difference_of_functions(const Register& message) const;
  void gather(ConnectionId connection, Register message, TimePoint now);
  void admit(ConnectionId connection, Register message);
  int rank_for(const Member& member) const;
  const Worker* holder_of(const std::string& name) const;
  Welcome make_welcome() const;
  void bury(ConnectionId connection, const std::string& story);
  /// Of a world that runs; the story begins with the worker.
  void end_of(int rank, const std::string& story);
  void fail(const Error& reason);
  void refuse(ConnectionId connection, const Error& reason, bool passing = false);
  void welcome_everybody();
  template <class Message>
  void tell_others(int rank, const Message& message);
  Error missing_workers() const;
  int rank_of(ConnectionId connection) const;

  const StoreOptions options_;
  const Connections connections_;
  MessageTable<ConnectionId, TimePoint> messages_;
  Rounds rounds_;
  Heartbeats heartbeats_;
  Phase phase_;
  std::map<int, Worker> workers_;                           ///< the latest of every rank
  std::map<ConnectionId, int> ranks_;                       ///< of the registered connections
  std::vector<std::pair<ConnectionId, Register>> waiting_;  ///< came to an open world before rank 0
  std::set<ConnectionId> refused_;                          ///< told, and not yet closed
  std::set<ConnectionId> silent_;                           ///< declared dead, and not yet closed
  std::set<int> told_;                                      ///< ranks that heard why the world failed
  Deadline gather_until_;
  std::optional<Error> failure_;
};

}  // namespace torchspan::rendezvous
