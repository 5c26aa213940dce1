#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "rpc/references/held_references.h"
#include "rpc/references/owned_values.h"

namespace torchspan::rpc {

/// Implements one worker's part of the reference protocol as a pure state machine: events in, messages out;
/// no I/O, no clock, no lock (the driver holds one). Its rules: the owner learns every deletion, a parent is
/// kept until the owner knows its child, and a peer that is gone holds nothing. So a value lives exactly as
/// long as a living worker holds a reference to it that it got by way of living ones. References are opaque
/// and kept alive by shared pointers. docs/architecture/rref.md has the protocol in prose.
class RRefTable {
 public:
  using Keep = RRefEffects::Keep;
  using Effects = RRefEffects;
  using Forks = OwnedValues::Forks;
  struct Counts {
    std::size_t owners = 0;            ///< values with forks elsewhere, and values heard of
    std::size_t forks = 0;             ///< forks of those
    std::size_t users = 0;             ///< our references to values elsewhere
    std::size_t pending_users = 0;     ///< those of them that the owner has not confirmed
    std::size_t pending_children = 0;  ///< our references kept for a child in flight
    std::size_t remembered = 0;        ///< what is kept about things that are gone; bounded
  };

  explicit RRefTable(std::uint32_t self);
  RRefTable(const RRefTable&) = delete;

  /// Sets this worker's rank and incarnation. Does not reuse ids of processes that had the rank before.
  void begin(PeerId self);
  PeerId self() const { return self_; }
  const Presence& presence() const { return presence_; }
  /// Adds a worker to the world, before anything from it is handled.
  void join(PeerId peer, Effects& effects);
  /// Removes a worker that died or left, when nothing can be sent to it any more.
  void depart(PeerId peer, Effects& effects);

  GlobalId next_id();
  /// Returns the id of a value that this worker makes on `owner`.
  GlobalId next_value(std::uint32_t owner);

  OwnedValues& owned() { return owned_; }
  const OwnedValues& owned() const { return owned_; }
  HeldReferences& held() { return held_; }
  const HeldReferences& held() const { return held_; }

  /// Sends a reference to `to`: returns the fork for its handle, or nullopt if `to` is gone.
  std::optional<GlobalId> send_owner(GlobalId value, const Keep& owner, PeerId to);
  std::optional<GlobalId> send_user(const Keep& user, PeerId to);
  /// Takes back a handle whose message could not be sent.
  void unsend(const wire::Handle& handle, Effects& effects);
  /// Finds a value of this worker by a handle that came from `from`.
  OwnedValues::Found receive_at_owner(const wire::Handle& handle, PeerId from, const Keep& fresh,
                                      Effects& effects);

  /// Handles a control message; the refusal is the answer to a fork request, whose `to` names the owner's
  /// incarnation that it means.
  std::optional<Refusal> receive(const RRefMessage& message, PeerId from, Effects& effects);

  /// Returns what `peer` holds of this worker's or is to get, to ask it after its connection broke.
  Forks forks_at(PeerId peer) const;
  /// Handles a fork that its receiver reports as lost.
  void lost(GlobalId value, GlobalId fork, Effects& effects);

  Counts counts() const;
  /// Releases everything, for shutdown.
  void clear(Effects& effects);

 private:
  PeerId self_;
  std::uint64_t counter_ = 0;
  std::map<std::uint32_t, std::uint64_t> values_;  ///< by owner's rank: how many were made so far
  Presence presence_;
  OwnedValues owned_{presence_};
  HeldReferences held_{presence_};
};

/// Holds a worker's table of references and its lock, which is never held during a send or a destruction.
struct SharedRRefTable {
  explicit SharedRRefTable(std::uint32_t self) : table(self) {}

  mutable Mutex mutex;
  RRefTable table TORCHSPAN_GUARDED_BY(mutex);
};

}  // namespace torchspan::rpc
