#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/log.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "rendezvous/first_death.h"

namespace torchspan::rendezvous {

/// Logs the deaths of other workers. All workers log them, and many workers end because another one did. Therefore deaths
/// that follow a warning within some seconds are logged at level info, after one warning that says so. Not thread-safe.
class DeathLog {
 public:
  DeathLog(Log& log, Executor& executor) : log_(log), executor_(executor) {}

  /// Logs deaths of one cause: `messages` name the workers, and `how` completes "7 more workers".
  void write(const std::vector<std::string>& messages, const std::string& how);
  FirstDeath& first() { return first_; }

 private:
  Log& log_;
  Executor& executor_;
  FirstDeath first_;
  std::optional<TimePoint> warned_;  ///< when deaths were last logged as warnings
  bool says_more_ = false;           ///< that more workers died since
};

enum class Presence : std::uint8_t { kPresent, kLeft, kDied };

/// The events of the other workers, and the callbacks that get them in order. Keeps the events of the latest
/// holder of each rank for callbacks that are added later; forgets those of earlier holders once all present
/// callbacks have had them. So its size and the cost of a new callback depend on the ranks, not on the number
/// of deaths. Thread-safe; one thread at a time calls deliver().
class MemberEvents {
 public:
  explicit MemberEvents(Runtime& runtime) : runtime_(runtime) {}

  void add(const Member& member, Presence now, std::shared_ptr<const Error> death);
  /// Destroys `callbacks` at once after clear().
  void watch(Membership::Callbacks callbacks);
  /// Calls back until all callbacks have had all events.
  void deliver();
  /// Destroys all callbacks, without a lock.
  void clear();
  /// How many events are kept.
  std::size_t size() const;

 private:
  struct Event {
    Member member;
    Presence now;
    std::shared_ptr<const Error> death;
    bool past = false;  ///< another process holds the rank now
  };
  using EventPtr = std::shared_ptr<Event>;
  struct Listener {
    Membership::Callbacks callbacks;
    std::uint64_t next = 0;   ///< number of its next event
    std::uint64_t since = 0;  ///< it gets past events from this number on
  };
  using ListenerPtr = std::shared_ptr<Listener>;

  /// The next event of the listener that is furthest behind; removes listeners whose owner has ended.
  std::pair<ListenerPtr, EventPtr> next(std::vector<ListenerPtr>& ended);
  EventPtr next_of(Listener& listener) TORCHSPAN_REQUIRES(mutex_);
  void remove_ended(std::vector<ListenerPtr>& ended) TORCHSPAN_REQUIRES(mutex_);
  void forget_past() TORCHSPAN_REQUIRES(mutex_);
  static void notify(const Membership::Callbacks& callbacks, const Event& event);

  Runtime& runtime_;
  mutable Mutex mutex_;
  std::map<std::uint64_t, EventPtr> events_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by number
  std::map<int, std::vector<std::uint64_t>> latest_
      TORCHSPAN_GUARDED_BY(mutex_);  ///< by rank: the events of its latest holder
  std::vector<std::uint64_t> past_ TORCHSPAN_GUARDED_BY(mutex_);  ///< events of earlier holders
  std::uint64_t end_ TORCHSPAN_GUARDED_BY(mutex_) = 0;            ///< number of the next event
  std::vector<ListenerPtr> listeners_ TORCHSPAN_GUARDED_BY(mutex_);
  bool cleared_ TORCHSPAN_GUARDED_BY(mutex_) = false;
};

}  // namespace torchspan::rendezvous
