#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "rendezvous/messages.h"

namespace torchspan::rendezvous {

/// The store decides about deadlines, so that all hear the same; it gets a little longer to say so.
Deadline with_grace(Deadline deadline);

/// One worker's end of its connection to the store: dials until rank 0 is there, registers, keeps what it
/// hears of the others, and carries rounds. Its thread alone drives the transport and runs the callbacks.
class Client final : private net::Handler {
 public:
  Client(Runtime& runtime, const TransportFactory& transports, MembershipOptions options, Member self);
  /// Breaks the connection unless leave() ended it.
  ~Client() override;

  enum class Presence : std::uint8_t { kPresent, kLeft, kDied };
  /// The latest holder of a rank.
  struct Known {
    Member member;
    Presence presence = Presence::kPresent;
    std::optional<Error> death = {};
  };

  /// Waits for the verdict and returns this worker as the store knows it; throws a refusal.
  Member join();
  std::vector<Member> members() const;
  int world_size() const;
  std::optional<Known> find(int rank) const;
  /// `ranks` ascending, this worker's among them.
  std::vector<Bytes> gather(const std::string& tag, BytesView mine, std::vector<int> ranks,
                            const Membership::Wait& wait);
  void leave(Deadline deadline);
  void give_up(const std::string& why, Deadline deadline);
  /// The callbacks are destroyed, with what they captured, when this worker's own part ends: as leave(),
  /// give_up() or end_part() begins, after rounds that other threads wait for were cancelled; at once where
  /// that has happened already. A worker that the others hold for dead hears of its own death as well, last.
  void watch(Membership::Callbacks callbacks);
  /// Fails the rounds that are under way and all later ones, and destroys the listeners.
  void end_part(const Error& reason);
  bool is_callback_thread() const { return thread_.is_current(); }

 private:
  /// A barrier or gather somebody waits for.
  struct Slot {
    std::unique_ptr<Parker> parker;
    bool done = false;
    std::vector<Bytes> bytes;
    std::optional<std::vector<int>> missing;  ///< told, and not passed on yet
    std::optional<Error> error;
  };
  /// What happened to another worker; kept for those who ask later.
  struct Event {
    Member member;
    Presence now;
    std::optional<Error> death;
  };
  struct Listener {
    Membership::Callbacks callbacks;
    std::size_t next = 0;  ///< index into events_
  };
  /// Rounds of some ranks under some tag, counted as long as nobody's place is taken.
  struct RoundCounter {
    std::vector<std::uint32_t> incarnations;
    std::uint64_t next = 0;
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
  void meet(Welcome message);
  void note_arrival(Member member);
  void note_end(int rank, std::optional<Error> death);
  /// The others hold this worker for dead. To itself it stays present.
  void note_own_death(const Error& reason);
  /// Until the slot is done or the time over; tells who is missing meanwhile.
  std::vector<Bytes> wait_for(std::uint64_t call, Slot& slot, const Membership::Wait& wait);
  void ask_missing(std::uint64_t call);
  void number(Contribute& message) TORCHSPAN_REQUIRES(mutex_);
  void finish_slot(std::uint64_t call, const std::function<void(Slot&)>& fill);
  /// Says the first last words to the store, waits until they were heard, and ends the thread.
  void end_with(const Bytes& last_words, const Error& for_waiters, Deadline deadline);
  void cancel_slots(const Error& reason) TORCHSPAN_REQUIRES(mutex_);
  void tell_listeners();
  void forget_listeners();
  static void tell(const Membership::Callbacks& callbacks, const Event& event);
  Error unreachable() const;
  void stop();

  Runtime& runtime_;
  const MembershipOptions options_;
  const Member self_;
  const TimePoint began_;
  const Deadline join_until_;
  MessageTable<> messages_;

  // Of the client's thread alone.
  Deadline retry_at_;
  Duration backoff_;
  std::optional<Duration> patience_;  ///< with a silent store; none on its own host
  Deadline silent_at_;
  bool declared_dead_ = false;

  mutable Mutex mutex_;
  std::shared_ptr<net::Channel> channel_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> last_failure_ TORCHSPAN_GUARDED_BY(mutex_);  ///< of dialling
  bool decided_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::optional<Error> refusal_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<int, Known> known_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> store_gone_ TORCHSPAN_GUARDED_BY(mutex_);
  bool leaving_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool left_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::map<std::pair<std::string, std::vector<int>>, RoundCounter> rounds_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t next_call_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, std::shared_ptr<Slot>> slots_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Event> events_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Listener>> listeners_ TORCHSPAN_GUARDED_BY(mutex_);
  bool deaf_ TORCHSPAN_GUARDED_BY(mutex_) = false;  ///< there are no listeners any more

  std::unique_ptr<Parker> verdict_;
  std::unique_ptr<Parker> farewell_;
  std::atomic<bool> stopping_{false};
  std::unique_ptr<net::Transport> transport_;
  Thread thread_;
};

}  // namespace torchspan::rendezvous
