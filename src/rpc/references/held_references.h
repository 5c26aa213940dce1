#pragma once
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "rpc/references/rref_message.h"

namespace torchspan::rpc {

/// Implements a user's part of the reference protocol: the references held here to values elsewhere. Keeps a
/// *pending* reference, which its owner does not know yet, and a *parent*, until the owner knows its child.
/// Pure: see RRefTable.
class HeldReferences {
 public:
  using Keep = RRefEffects::Keep;
  using Effects = RRefEffects;
  struct User {
    PeerId owner;
    GlobalId value;
    std::weak_ptr<void> reference;
    bool counted = true;  ///< false: the owner does not count it, or was sent its deletion
  };

  struct Child {
    Keep parent;
    PeerId to;
  };

  explicit HeldReferences(const Presence& presence) : presence_(presence) {}

  /// Adds a reference whose creation is in flight.
  void add_creating(PeerId owner, GlobalId value, GlobalId fork, const Keep& user);
  /// Records that the owner counts the fork, whether or not the creation failed.
  void created(GlobalId fork, Effects& effects);
  /// Gives up a creation that may or may not have arrived, and reports that to the owner.
  void give_up(GlobalId fork, std::string reason, Effects& effects);

  /// Adds a child received from `parent`. Done at once if the parent is the owner; otherwise asks the owner,
  /// and fork_answered() ends it. Returns a refusal if the owner is gone, and kSentTwice, without effect, for a fork that
  /// is here.
  std::optional<Refusal> adopt(const wire::Handle& handle, PeerId parent, const Keep& user, Effects& effects);
  void fork_answered(GlobalId fork, bool counted, Effects& effects);
  bool pending(GlobalId fork) const { return pending_.contains(fork); }
  /// Ends a reference; sends one deletion to the owner.
  void release(GlobalId fork, Effects& effects);

  void send_child(GlobalId child, const Keep& parent, PeerId to) { children_[child] = {parent, to}; }
  /// Releases the parent of a child that the owner knows, that was never sent, or that is lost.
  void release_child(GlobalId child, Effects& effects);
  /// Returns the receiver of a child, if the child is in flight.
  std::optional<PeerId> receiver_of(GlobalId child) const;

  /// Returns those of `forks` that are not here, although `from` believes so. If one arrives later, it is
  /// refused.
  std::vector<GlobalId> missing(const std::vector<GlobalId>& forks, PeerId from);
  bool is_missing(GlobalId fork, PeerId from) const;
  /// Handles a worker that died or left: releases the parents of children in flight to it; references to its
  /// values are no longer usable.
  void depart(PeerId peer, Effects& effects);
  void children_at(PeerId peer, std::map<GlobalId, GlobalId>& forks) const;

  /// Sends the deletion of every reference to its owner, for shutdown. Returns the references that still
  /// exist.
  std::vector<Keep> release_all(Effects& effects);
  void clear(Effects& effects);

  std::shared_ptr<void> find(GlobalId fork) const;
  const std::map<GlobalId, User>& all() const { return users_; }
  const std::map<GlobalId, Child>& children() const { return children_; }
  std::size_t pending_count() const { return pending_.size(); }
  std::size_t children_count() const { return children_.size(); }
  std::size_t remembered() const;

 private:
  struct Pending {
    Keep user;
    std::optional<PeerId> parent;  ///< the peer that waits for the acceptance
  };
  struct Missing {
    std::set<GlobalId> forks;
    std::deque<GlobalId> oldest;
  };

  const Presence& presence_;
  std::map<GlobalId, User> users_;  ///< by fork
  std::map<GlobalId, Pending> pending_;
  std::map<GlobalId, Child> children_;
  std::map<std::uint32_t, std::uint64_t> asked_;  ///< by owner's rank: fork requests so far
  std::map<PeerId, Missing> missing_;             ///< by the peer that got the reply
};

}  // namespace torchspan::rpc
