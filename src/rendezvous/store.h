#pragma once
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "rendezvous/messages.h"
#include "rendezvous/rounds.h"

namespace torchspan::rendezvous {

using ConnectionId = std::uint64_t;

struct StoreOptions {
  int world_size = 1;
  std::string job;
};

/// What rank 0 serves, as a table without I/O or clock: messages and ends of connections in, messages out.
/// First the world gathers; a registration that cannot be, or the first deadline, fails it for everybody.
/// Then it is complete: deaths and good-byes are announced and rounds are held. One thread at a time.
class Store {
 public:
  using Send = std::function<void(ConnectionId, Bytes)>;
  Store(StoreOptions options, Send send);

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
  enum class Phase { kGathering, kComplete, kFailed };
  struct Worker {
    Register registration;
    std::optional<ConnectionId> connection;  ///< none once it left or died
  };

  void on_register(ConnectionId connection, Register message, TimePoint now);
  void on_leave(ConnectionId connection);
  std::optional<Error> reason_to_turn_away(const Register& message) const;
  std::optional<Error> reason_to_fail(const Register& message) const;
  void fail(const Error& reason);
  void refuse(ConnectionId connection, const Error& reason);
  void welcome_everybody();
  template <class Message>
  void tell_others(int rank, const Message& message);
  Error missing_workers() const;
  int rank_of(ConnectionId connection) const;

  const StoreOptions options_;
  const Send send_;
  MessageTable<ConnectionId, TimePoint> messages_;
  Rounds rounds_;
  Phase phase_ = Phase::kGathering;
  std::map<int, Worker> workers_;
  std::map<ConnectionId, int> ranks_;  ///< of the registered connections
  std::set<ConnectionId> refused_;     ///< told, and not yet closed
  std::set<int> told_;                 ///< ranks that heard why the world failed
  Deadline gather_until_;
  std::optional<Error> failure_;
};

}  // namespace torchspan::rendezvous
