#pragma once
#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "rpc/references/number_set.h"
#include "rpc/references/rref_message.h"

namespace torchspan::rpc {

/// An owner's part of the reference protocol. A value is *heard of* when a use or a fork of it came before
/// its creation, *alive* when the creation came and somebody elsewhere holds a fork, and gone otherwise. What
/// is heard of always becomes alive or fails: its creator says when it gives up, and a creator that is gone
/// brings nothing any more. Pure: see RRefTable.
class OwnedValues {
 public:
  using Keep = RRefEffects::Keep;
  using Effects = RRefEffects;
  /// A value that a handle names: what holds it, or why it cannot be had.
  struct Found {
    Keep owner;
    std::optional<Refusal> refusal;
  };

  explicit OwnedValues(const Presence& presence) : presence_(presence) {}
  void begin(PeerId self) { self_ = self; }

  /// A fork held by `holder` exists from now on; `owner` stays alive with it. False when the holder is gone.
  bool add_fork(GlobalId value, GlobalId fork, PeerId holder, const Keep& owner);
  Keep find(GlobalId value) const;
  /// A creation by this worker itself is on the way: kept, whatever its forks, until own_creation_ended().
  void expect_own(GlobalId value, const Keep& owner);
  /// It came, or failed: the value lives by its forks from now on.
  void own_creation_ended(GlobalId value, Effects& effects);
  /// Another worker's creation came, with `fork` for its creator. Gives what is to be filled, `fresh` or what
  /// others found before; null when it does not count: it was given up, or its creator is gone.
  Keep creation_came(GlobalId value, GlobalId fork, const Keep& fresh);
  /// The creator gave up: what has not come does not count any more, and fails for those who wait.
  void creation_given_up(const RRefMessage& message, PeerId creator, Effects& effects);

  /// Counts a user's fork. Copies of a request, known by its number, get the same answer and change nothing.
  std::optional<Refusal> request_fork(GlobalId value, GlobalId fork, std::uint64_t number, PeerId holder);
  /// A handle came home. `fresh` holds what is only heard of.
  Found come_home(GlobalId value, GlobalId fork, PeerId from, const Keep& fresh, Effects& effects);
  void remove_fork(GlobalId value, GlobalId fork, const Refusal& why, Effects& effects);
  /// Who holds a fork, if it is counted.
  std::optional<PeerId> holder_of(GlobalId value, GlobalId fork) const;
  /// A worker died or left: its forks are gone, and so is what only it could have brought.
  void depart(PeerId peer, Effects& effects);

  using Forks = std::map<GlobalId, GlobalId>;  ///< fork -> value
  void forks_at(PeerId peer, Forks& forks) const;
  void clear(Effects& effects);

  struct Owned {
    Keep owner;                        ///< null: heard of by fork requests only
    std::map<GlobalId, PeerId> forks;  ///< fork -> who holds it
    bool came = true;                  ///< false: heard of
  };
  const std::map<GlobalId, Owned>& all() const { return owned_; }
  std::size_t size() const { return owned_.size(); }
  std::size_t forks() const { return forks_; }
  /// Memory that is not a living reference's: gaps among numbers, and reasons kept for late comers.
  std::size_t remembered() const;

 private:
  using Entry = std::map<GlobalId, Owned>::iterator;
  /// Whether a value that is not here may still be created.
  bool may_come(GlobalId value) const;
  Refusal why_gone(GlobalId value) const;
  void remember(GlobalId value, Refusal why);
  void count(Owned& owned, GlobalId fork, PeerId holder);
  void erase_if_unused(Entry it, const Refusal& why, Effects& effects);
  void fail(Entry it, const Refusal& why, Effects& effects);

  const Presence& presence_;
  PeerId self_;
  std::map<GlobalId, Owned> owned_;
  std::size_t forks_ = 0;
  std::map<PeerId, NumberSet> created_;    ///< by creator: creations that came or were given up
  std::map<PeerId, NumberSet> requested_;  ///< by holder: fork requests that were answered
  std::map<GlobalId, Refusal> reasons_;    ///< of values gone lately, for the texts of errors only
  std::deque<GlobalId> oldest_reasons_;
};

}  // namespace torchspan::rpc
