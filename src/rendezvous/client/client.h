#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "rendezvous/client/client_rounds.h"
#include "rendezvous/client/member_events.h"
#include "rendezvous/messages/messages.h"

namespace torchspan::rendezvous {

/// One worker's end of its connection to the store: dials until rank 0 answers, registers, keeps a table of
/// the other workers, and takes part in rounds. Only its thread drives the transport and runs the callbacks.
class Client final : private net::Handler {
 public:
  Client(Runtime& runtime, const TransportFactory& transports, MembershipOptions options, Member self);
  /// Closes the connection without a goodbye unless leave() ended it.
  ~Client() override;

  /// The latest holder of a rank.
  struct Known {
    Member member;
    Presence presence = Presence::kPresent;
    std::shared_ptr<const Error> death = {};
  };

  /// Waits for the result and returns this worker's registration; throws the reason if the store refuses it.
  Member join();
  std::vector<Member> members() const;
  std::optional<Known> find(int rank) const;
  /// The message of a round that begins now: the tag, this worker's bytes, and the ranks, which must be ascending and
  /// contain this worker's.
  Contribute contribution(const std::string& tag, BytesView mine, const std::vector<int>& ranks,
                          Deadline deadline) const;
  ClientRounds& rounds() { return rounds_; }
  void leave(Deadline deadline);
  void give_up(const std::string& why, Deadline deadline);
  /// The callbacks are destroyed when this worker's part ends: at the start of leave(), give_up() or
  /// end_part(), after the rounds of other threads were cancelled; at once if that has happened already. A
  /// worker that the others declared dead is notified of its own death, too, after all other events.
  void watch(Membership::Callbacks callbacks);
  std::vector<int> ranks() const;
  std::optional<Member> find_named(std::string_view name) const;
  /// Fails all current and later rounds, and destroys the listeners.
  void end_part(const Error& reason);
  bool is_callback_thread() const { return runner_.id.load() == ::gettid(); }

 private:
  /// What the store has said of itself and of this worker.
  struct StoreFacts {
    bool newer = false;  ///< supports a newer version of the protocol
    bool declared_dead = false;
  };
  struct Redial {
    Deadline at = {};  ///< when to dial again
    Duration pause;    ///< after the next failure
  };

  struct DialFailure {
    Error error;
    TimePoint at;
    std::optional<Error> before = {};  ///< the last one of another kind
  };

  void add_handlers();
  void run();
  void connect();
  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override;
  void on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) override;
  void on_closed_before_welcome(const Error& reason);
  void on_store_gone(const Error& reason, bool held_for_dead);
  void on_silence();
  void lose_store(const Error& reason, bool silent = false);
  void decide(std::optional<Error> refusal);
  void on_welcome(Welcome message);
  void note(const Changes& changes);
  void note_arrival(const Member& member);
  void note_end(int rank, std::shared_ptr<const Error> death);
  /// The others declared this worker dead. In its own table it stays present.
  void note_own_death(const Error& reason);
  std::vector<Member> known_members(const std::vector<int>& ranks) const;
  std::uint32_t incarnation_of(int rank) const;
  /// Throws Error if the connection is closing.
  void send_to_store(const Bytes& message);
  /// Sends the last message to the store, unless one was sent before, waits for its answer, and ends the
  /// thread.
  void end_with(const Bytes& last_lines, const Error& for_waiters, Deadline deadline);
  Error unreachable() const;
  void stop();

  Runtime& runtime_;
  const MembershipOptions options_;
  Member self_;  ///< its instance is that of the latest registration, and changes on the client's thread
  const TimePoint began_;
  const Deadline join_until_;
  MessageTable<> messages_;

  // For the client's thread only.
  Redial redial_;
  std::optional<Duration> patience_;  ///< limit for a silent store; none on the store's host
  Deadline silent_at_;
  StoreFacts store_;
  DeathLog death_log_;

  mutable Mutex mutex_;
  std::shared_ptr<net::Channel> channel_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<DialFailure> last_failure_ TORCHSPAN_GUARDED_BY(mutex_);
  bool decided_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::optional<Error> refusal_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<int, Known> known_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> store_gone_ TORCHSPAN_GUARDED_BY(mutex_);
  bool leaving_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool left_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  MemberEvents events_;

  ClientRounds rounds_;
  std::unique_ptr<Parker> verdict_;
  std::unique_ptr<Parker> farewell_;
  std::atomic<bool> stopping_{false};
  std::unique_ptr<net::Transport> transport_;
  /// `id` is that of the thread also while another one joins it.
  struct Runner {
    std::atomic<pid_t> id{0};
    Thread thread;
  };
  Runner runner_;
};

}  // namespace torchspan::rendezvous
