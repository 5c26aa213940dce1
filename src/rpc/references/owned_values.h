#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <vector>

#include "rpc/references/rref_message.h"

namespace torchspan::rpc {

/// Holds numbers that arrive nearly in order as intervals, so its size is the number of gaps. Numbers that
/// one sender counts up thus take as much memory as are in flight at once, however many arrived.
class NumberSet {
 public:
  /// Returns false if the number was there already.
  bool insert(std::uint64_t number) {
    auto after = intervals_.upper_bound(number);
    auto before = after == intervals_.begin() ? intervals_.end() : std::prev(after);
    if (before != intervals_.end() && number < before->second) return false;
    const bool joins_before = before != intervals_.end() && before->second == number;
    const bool joins_after = after != intervals_.end() && after->first == number + 1;
    if (joins_before && joins_after) {
      before->second = after->second;
      intervals_.erase(after);
    } else if (joins_before) {
      before->second = number + 1;
    } else if (joins_after) {
      const std::uint64_t end = after->second;
      intervals_.erase(after);
      intervals_.emplace(number, end);
    } else {
      intervals_.emplace(number, number + 1);
    }
    return true;
  }
  bool contains(std::uint64_t number) const {
    auto after = intervals_.upper_bound(number);
    return after != intervals_.begin() && number < std::prev(after)->second;
  }
  /// Returns what determines its memory, not how many numbers it holds.
  std::size_t intervals() const { return intervals_.size(); }

 private:
  std::map<std::uint64_t, std::uint64_t> intervals_;  ///< first -> one past the last
};

/// Implements an owner's part of the reference protocol. A value is *heard of* if a use or a fork of it
/// arrived before its creation, *alive* if the creation arrived and another worker holds a fork, and gone
/// otherwise. A value heard of always becomes alive or fails: its creator reports that it gave up, and a
/// creator that is gone creates nothing any more. Pure: see RRefTable.
class OwnedValues {
 public:
  using Keep = RRefEffects::Keep;
  using Effects = RRefEffects;
  /// A value that a handle names: its owner's reference, or why the value is not available.
  struct Found {
    Keep owner;
    std::optional<Refusal> refusal;
  };

  explicit OwnedValues(const Presence& presence) : presence_(presence) {}
  void begin(PeerId self) { self_ = self; }

  /// Adds a fork held by `holder`; `owner` stays alive with it. Returns false if the holder is gone.
  bool add_fork(GlobalId value, GlobalId fork, PeerId holder, const Keep& owner);
  Keep find(GlobalId value) const;
  /// Keeps a value that this worker itself is creating, with or without forks, until own_creation_ended().
  void expect_own(GlobalId value, const Keep& owner);
  /// Ends such a creation, arrived or failed: from then on, forks keep the value.
  void own_creation_ended(GlobalId value, Effects& effects);
  /// Counts another worker's creation that arrived, with `fork` for its creator. Returns the reference to
  /// fill: `fresh`, or the one that earlier uses found. Returns null if the creation does not count: it was
  /// given up, or its creator is gone.
  Keep creation_arrived(GlobalId value, GlobalId fork, const Keep& fresh);
  /// Handles a creation that its creator gave up: if it has not arrived, it no longer counts, and the calls
  /// that wait for it fail.
  void creation_given_up(const RRefMessage& message, PeerId creator, Effects& effects);

  /// Counts a user's fork. Copies of a request, recognized by its number, get the same answer and change
  /// nothing.
  std::optional<Refusal> request_fork(GlobalId value, GlobalId fork, std::uint64_t number, PeerId holder);
  /// Finds the value of a handle that returned to its owner. `fresh` becomes the reference of a value that is
  /// only heard of.
  Found receive_at_owner(GlobalId value, GlobalId fork, PeerId from, const Keep& fresh, Effects& effects);
  void remove_fork(GlobalId value, GlobalId fork, const Refusal& why, Effects& effects);
  /// Returns the holder of a fork, if the fork is counted.
  std::optional<PeerId> holder_of(GlobalId value, GlobalId fork) const;
  /// Handles a worker that died or left: removes its forks, and fails the values that only it could have
  /// created.
  void depart(PeerId peer, Effects& effects);

  using Forks = std::map<GlobalId, GlobalId>;  ///< fork -> value
  void forks_at(PeerId peer, Forks& forks) const;
  void clear(Effects& effects);

  struct Owned {
    Keep owner;                        ///< null: heard of by fork requests only
    std::map<GlobalId, PeerId> forks;  ///< fork -> holder
    bool came = true;                  ///< false: heard of
  };
  const std::map<GlobalId, Owned>& all() const { return owned_; }
  std::size_t size() const { return owned_.size(); }
  std::size_t forks() const { return forks_; }
  /// Counts what is kept besides living references: gaps among numbers, and reasons kept for late requests.
  std::size_t remembered() const;

 private:
  using Entry = std::map<GlobalId, Owned>::iterator;
  /// Whether a value that is not in the table may still be created.
  bool may_arrive(GlobalId value) const;
  Refusal why_gone(GlobalId value) const;
  void remember(GlobalId value, Refusal why);
  void count(Owned& owned, GlobalId fork, PeerId holder);
  void erase_if_unused(Entry it, const Refusal& why, Effects& effects);
  void fail(Entry it, const Refusal& why, Effects& effects);

  const Presence& presence_;
  PeerId self_;
  std::map<GlobalId, Owned> owned_;
  std::size_t forks_ = 0;
  std::map<PeerId, NumberSet> created_;    ///< by creator: creations that arrived or were given up
  std::map<PeerId, NumberSet> requested_;  ///< by holder: fork requests that were answered
  std::map<GlobalId, Refusal> reasons_;    ///< of values gone recently, for error messages only
  std::deque<GlobalId> oldest_reasons_;
};

}  // namespace torchspan::rpc
