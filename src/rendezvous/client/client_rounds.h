#pragma once
#include <cstddef>
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

#include "rendezvous/messages/messages.h"

namespace torchspan::rendezvous {

/// Numbers a worker's rounds: the nth of the same ranks under the same tag is n-1, and counting restarts when
/// one of the ranks has a new holder. Each set of ranks is stored once, and each tag that is used more than once. For one
/// thread at a time.
class RoundNumbers {
 public:
  /// How many tags are counted.
  std::size_t size() const {
    std::size_t tags = 0;
    for (const auto& [ranks, numbers] : numbers_) tags += numbers.gathers.size() + numbers.sums.size();
    return tags;
  }
  /// Another process holds a rank.
  void replaced() { ++holders_; }
  /// Sets the round's number and the incarnations, which `incarnation_of(rank)` returns.
  template <class Incarnation>
  void number(Contribute& message, Incarnation incarnation_of) {
    Numbers& numbers = numbers_[message.ranks];
    if (numbers.holders != holders_) {
      std::vector<std::uint32_t> latest;
      for (const int rank : message.ranks.list()) latest.push_back(incarnation_of(rank));
      if (latest != numbers.incarnations) numbers = {std::move(latest), {}, {}};
      numbers.holders = holders_;
    }
    message.incarnations = numbers.incarnations;
    if (message.once) return;
    message.round = (message.counts.empty() ? numbers.gathers : numbers.sums)[message.tag]++;
  }

 private:
  struct Numbers {
    std::vector<std::uint32_t> incarnations;
    std::map<std::string, std::uint64_t> gathers, sums;  ///< by tag: the next round's number
    std::uint64_t holders = 0;                           ///< holders_ when the incarnations were looked up
  };
  std::uint64_t holders_ = 1;
  std::map<Ranks, Numbers> numbers_;
};

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
