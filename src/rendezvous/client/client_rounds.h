#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "rendezvous/messages/messages.h"

namespace torchspan::rendezvous {

/// The store decides about deadlines, so that all workers get the same result; clients wait a little longer
/// for it.
Deadline with_grace(Deadline deadline);

/// One worker's part in the rounds of barriers and gathers: numbers its contributions, and passes the store's answers to
/// the threads and callbacks that wait for them. Thread-safe; calls `send` and callbacks without its lock.
class ClientRounds {
 public:
  /// Sends a message to the store, if it is connected.
  using Send = std::function<void(const Bytes& message)>;
  ClientRounds(Runtime& runtime, std::string store_address, Send send);

  /// Contributes and waits. The message has no numbers yet.
  std::vector<Bytes> gather(Contribute message, const Membership::Wait& wait);
  /// Contributes; `done` gets the result.
  void gather_async(Contribute message, Membership::GatherCallback done);

  // The store's answers; those to a call that no longer waits are ignored.
  void complete(std::uint64_t call, std::vector<Bytes> all);
  void fail(std::uint64_t call, const Error& reason);
  void set_missing(std::uint64_t call, std::vector<Member> missing);
  /// Fails all calls with `reason`; calls that begin later throw `later`.
  void cancel(const Error& reason, const Error& later);

 private:
  /// A barrier or gather for which a thread waits, or whose result a callback takes.
  struct Slot {
    std::unique_ptr<Parker> parker;            ///< of the thread; null: none
    Membership::GatherCallback callback = {};  ///< without a thread
    bool done = false;
    std::vector<Bytes> bytes = {};
    std::optional<std::vector<Member>> missing = {};  ///< from the store, not reported yet
    std::optional<Error> error = {};
  };
  /// Rounds of the same ranks under the same tag; counted until one of the workers is replaced.
  struct Counter {
    std::vector<std::uint32_t> incarnations;
    std::uint64_t next = 0;
  };

  std::uint64_t contribute(Contribute message, const std::shared_ptr<Slot>& slot);
  /// Waits until the slot is done or the time is over; reports missing ranks meanwhile.
  std::vector<Bytes> wait_for(std::uint64_t call, Slot& slot, const Membership::Wait& wait);
  void ask_missing(std::uint64_t call);
  void forget(std::uint64_t call);
  void finish(std::uint64_t call, const std::function<void(Slot&)>& fill);
  void call_back(Slot& slot) const;

  Runtime& runtime_;
  const std::string store_address_;
  const Send send_;
  Mutex mutex_;
  std::optional<Error> cancelled_ TORCHSPAN_GUARDED_BY(mutex_);  ///< what later calls throw
  std::map<std::pair<std::string, std::vector<int>>, Counter> counters_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t next_call_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, std::shared_ptr<Slot>> slots_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rendezvous
