#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/core/spans.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "rendezvous/client/round_numbers.h"
#include "rendezvous/messages/messages.h"

namespace torchspan::rendezvous {

/// The store decides about deadlines, so that all workers get the same result; clients wait a little longer
/// for it.
Deadline with_grace(Deadline deadline);

/// One worker's part in the rounds of barriers, gathers and sums: numbers its contributions, and passes the store's
/// answers to the threads and callbacks that wait for them. Thread-safe; calls `send` and callbacks without its lock.
class ClientRounds {
 public:
  /// Sends a message to the store, if it is connected.
  using Send = std::function<void(const Bytes& message)>;
  /// Returns the incarnation of a rank's latest holder; called with the lock of this object.
  using IncarnationOf = std::function<std::uint32_t(int rank)>;
  ClientRounds(Runtime& runtime, std::string store_address, Send send, IncarnationOf incarnation_of);

  /// Contributes and waits. The message has no numbers yet. After a second, the wait is an open operation `call`.
  std::vector<Bytes> gather(const std::string& call, Contribute message, const Membership::Wait& wait);
  /// The same for a message with counts.
  CountSums sum(const std::string& call, Contribute message, const Membership::Wait& wait);
  /// Contributes; `done` gets the result.
  void gather_async(Contribute message, Membership::GatherCallback done);

  /// Another process holds a rank.
  void replaced();
  // The store's answers; those to a call that no longer waits are ignored.
  /// Throws kInvalid if the answer has another number of ranks.
  void complete(const Gathered& message);
  void complete(Summed message);
  void fail(std::uint64_t call, const Error& reason);
  void set_missing(std::uint64_t call, std::vector<Member> missing);
  /// Fails all calls with `reason`; calls that begin later throw `later`.
  void cancel(const Error& reason, const Error& later);

 private:
  /// A barrier or gather for which a thread waits, or whose result a callback takes.
  struct Slot {
    std::unique_ptr<Parker> parker;            ///< of the thread; null: none
    Membership::GatherCallback callback = {};  ///< without a thread
    std::string name = {};                     ///< of the open operation
    SpanLink link = {};
    std::size_t ranks = 0;
    bool done = false;
    std::vector<Bytes> bytes = {};
    CountSums sums = {};
    std::optional<std::vector<Member>> missing = {};  ///< from the store, not reported yet
    std::optional<Error> error = {};
  };

  std::uint64_t contribute(Contribute message, const std::shared_ptr<Slot>& slot);
  /// Contributes, and returns the slot with the result.
  std::shared_ptr<Slot> take_part(const std::string& call, Contribute message, const Membership::Wait& wait);
  /// Waits until the slot is done or the time is over; reports missing ranks meanwhile.
  void wait_for(std::uint64_t call, Slot& slot, const Membership::Wait& wait);
  void ask_missing(std::uint64_t call);
  void forget(std::uint64_t call);
  void finish(std::uint64_t call, const std::function<void(Slot&)>& fill);
  void call_back(Slot& slot) const;

  Runtime& runtime_;
  const std::string store_address_;
  const Send send_;
  const IncarnationOf incarnation_of_;
  Mutex mutex_;
  std::optional<Error> cancelled_ TORCHSPAN_GUARDED_BY(mutex_);  ///< what later calls throw
  RoundNumbers numbers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t next_call_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, std::shared_ptr<Slot>> slots_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rendezvous
