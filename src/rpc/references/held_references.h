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

/// A user's part of the reference protocol: the references held here to values that live elsewhere. One whose
/// owner does not know it yet is *pending* and kept; so is a *parent*, until the owner knows its child. Pure:
/// see RRefTable.
class HeldReferences {
 public:
  using Keep = RRefEffects::Keep;
  using Effects = RRefEffects;
  struct User {
    PeerId owner;
    GlobalId value;
    std::weak_ptr<void> reference;
    bool counted = true;  ///< false: the owner does not count it, or has been told that it is gone
  };

  struct Child {
    Keep parent;
    PeerId to;
  };

  explicit HeldReferences(const Presence& presence) : presence_(presence) {}

  /// A reference whose creation is on its way.
  void add_creating(PeerId owner, GlobalId value, GlobalId fork, const Keep& user);
  /// The owner counts it, whatever became of the value.
  void created(GlobalId fork, Effects& effects);
  /// Nobody knows whether the creation came, and this worker does not wait for it any more: tells the owner.
  void give_up(GlobalId fork, std::string reason, Effects& effects);

  /// A child that came from `parent`. Done at once when the parent is the owner; else asks the owner, and
  /// fork_answered() ends it. Gives a refusal when there is nobody to ask.
  std::optional<Refusal> adopt(const wire::Handle& handle, PeerId parent, const Keep& user, Effects& effects);
  void fork_answered(GlobalId fork, bool counted, Effects& effects);
  bool pending(GlobalId fork) const { return pending_.contains(fork); }
  /// The reference ended: the owner is told, once.
  void release(GlobalId fork, Effects& effects);

  void send_child(GlobalId child, const Keep& parent, PeerId to) { children_[child] = {parent, to}; }
  /// The child is known to its owner, or was never sent, or is lost.
  void release_child(GlobalId child, Effects& effects);
  /// For whom a child is, if it is on its way.
  std::optional<PeerId> receiver_of(GlobalId child) const;

  /// What of `forks`, which `from` believes to be here, is not. Should it come later, it is refused.
  std::vector<GlobalId> missing(const std::vector<GlobalId>& forks, PeerId from);
  bool is_missing(GlobalId fork, PeerId from) const;
  /// A worker died or left: children on their way to it are gone, and references to its values are dead.
  void depart(PeerId peer, Effects& effects);
  void children_at(PeerId peer, std::map<GlobalId, GlobalId>& forks) const;

  /// Shutdown: tells the owners that every reference is gone; gives those that live.
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
    std::optional<PeerId> parent;  ///< who waits for the acceptance
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
  std::map<PeerId, Missing> missing_;             ///< by who was told
};

}  // namespace torchspan::rpc
