#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <torchspan/core/buffer.h>
#include <torchspan/wire/frame.h>

namespace torchspan::rpc {

/// A control message of the reference protocol, to be sent by whoever drives the table. Idempotent.
struct RRefMessage {
  enum class Kind : std::uint8_t {
    kForkRequest,  ///< user -> owner: this fork of the value exists, and I hold it
    kChildAccept,  ///< child -> parent: the owner knows the child, let go of it
    kUserDelete,   ///< user -> owner: this fork is gone
  };
  Kind kind = Kind::kForkRequest;
  std::uint32_t to = 0;
  GlobalId value;
  GlobalId fork;
  friend bool operator==(const RRefMessage&, const RRefMessage&) = default;
};

/// One worker's part of the reference protocol as a pure table: calls in, messages out; no I/O, no clock, no
/// lock (the driver holds one). Invariants of the protocol: the owner hears of every deletion, and a parent
/// is kept until the owner knows its child, so a value lives as long as any reference to it. References are
/// opaque here and kept alive by shared pointers; what an operation lets go of is returned, to be destroyed
/// outside the lock.
class RRefTable {
 public:
  using Keep = std::shared_ptr<void>;
  struct Effects {
    std::vector<RRefMessage> messages;
    std::vector<Keep> released;
  };
  struct Counts {
    std::size_t owners = 0;            ///< values with forks elsewhere
    std::size_t forks = 0;             ///< forks of those
    std::size_t pending_users = 0;     ///< our references that the owner has not confirmed
    std::size_t pending_children = 0;  ///< our references kept for a child on its way
  };
  struct Leak {
    GlobalId value;
    std::vector<GlobalId> forks;
  };

  explicit RRefTable(std::uint32_t self) : self_(self) {}
  /// The worker's place is known: its rank, and how many held it before. Their ids are not used again.
  void begin(std::uint32_t self, std::uint32_t incarnation) {
    self_ = self;
    counter_ += std::uint64_t{incarnation} << 40;
  }

  GlobalId next_id() { return {self_, ++counter_}; }

  /// Owner: a fork held by `holder` exists from now on; `owner` stays alive with it. A fork deleted before it
  /// was heard of stays deleted.
  void add_fork(GlobalId value, GlobalId fork, std::uint32_t holder, const Keep& owner);
  /// Owner: the reference registered under `value`, or null.
  Keep find_owner(GlobalId value) const;
  /// Owner: keeps `owner` findable under `value`, whatever its forks, until creation_arrived(): its creation
  /// is on the way, and references to it may come and go before it arrives.
  void expect_owner(GlobalId value, const Keep& owner);
  /// Owner: the creation arrived; the value lives by its forks from now on.
  void creation_arrived(GlobalId value, Effects& effects);

  /// Sender: a child fork of the user reference `parent` leaves for another worker; the parent stays alive
  /// until the child is accepted.
  GlobalId send_child(const Keep& parent, std::uint32_t to);
  /// Sender: the message with the child could not be sent.
  void undo_child(GlobalId child, Effects& effects);

  /// User: a reference whose creation is on its way stays alive until confirm_user().
  void add_pending_user(GlobalId fork, const Keep& user) { pending_users_[fork] = {user, std::nullopt}; }
  /// User: a child made by `parent`, who is not the owner: asks the owner for its fork.
  void adopt_child(const wire::Handle& handle, std::uint32_t parent, const Keep& user, Effects& effects);
  /// User: the owner knows the fork, or never will; a waiting parent may let go.
  void confirm_user(GlobalId fork, Effects& effects);

  /// Receiver of a handle made by `parent`, when we own the value: the child needs no fork, only its
  /// acceptance.
  void accept_at_owner(const wire::Handle& handle, std::uint32_t parent, Effects& effects);

  void on_fork_request(GlobalId value, GlobalId fork, std::uint32_t holder);
  void on_child_accept(GlobalId child, Effects& effects) { undo_child(child, effects); }
  void on_user_delete(GlobalId value, GlobalId fork, Effects& effects);
  /// A worker died or left: its forks of our values are gone with it, and the children on their way to it.
  void on_departure(std::uint32_t rank, Effects& effects);

  /// The forks that `rank` holds of our values, and the children on their way to it: value and fork.
  using Forks = std::map<GlobalId, GlobalId>;  ///< fork -> value
  Forks forks_at(std::uint32_t rank) const;
  /// `rank` says that it never got the fork.
  void on_lost(GlobalId value, GlobalId fork, Effects& effects);

  Counts counts() const;
  std::vector<Leak> leaks() const;
  /// Shutdown: lets go of everything.
  void clear(Effects& effects);

 private:
  struct Owned {
    Keep owner;
    std::map<GlobalId, std::uint32_t> forks;  ///< fork -> the rank that holds it
    bool expected = false;
  };
  struct PendingUser {
    Keep user;
    std::optional<std::uint32_t> parent;  ///< who waits for the acceptance
  };
  struct PendingChild {
    Keep parent;
    std::uint32_t to = 0;
  };
  void erase_if_unused(GlobalId value, Effects& effects);

  std::uint32_t self_;
  std::uint64_t counter_ = 0;
  std::map<GlobalId, Owned> owned_;
  std::set<GlobalId> tombstones_;  ///< forks deleted before the owner heard of them
  std::map<GlobalId, PendingUser> pending_users_;
  std::map<GlobalId, PendingChild> pending_children_;
};

}  // namespace torchspan::rpc
