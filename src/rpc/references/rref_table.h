#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "rpc/references/held_references.h"
#include "rpc/references/owned_values.h"

namespace torchspan::rpc {

/// One worker's part of the reference protocol as a pure state machine: what happens goes in, messages come
/// out; no I/O, no clock, no lock (the driver holds one). Its rules: the owner hears of every deletion, a
/// parent is kept until the owner knows its child, and who is gone holds nothing; so a value lives exactly as
/// long as any reference to it that a living worker holds by way of living ones. References are opaque here
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
    std::size_t pending_children = 0;  ///< our references kept for a child on its way
    std::size_t remembered = 0;        ///< what is kept of things that are gone; bounded
  };

  explicit RRefTable(std::uint32_t self);
  RRefTable(const RRefTable&) = delete;

  /// The worker's place is known. Ids of who had it before are not used again.
  void begin(PeerId self);
  PeerId self() const { return self_; }
  const Presence& presence() const { return presence_; }
  /// A worker is in the world: before anything of it is handled.
  void join(PeerId peer, Effects& effects);
  /// It died or left: after the last moment at which anything can be sent to it.
  void depart(PeerId peer, Effects& effects);

  GlobalId next_id();
  /// The id of a value that this worker makes on `owner`.
  GlobalId next_value(std::uint32_t owner);

  OwnedValues& owned() { return owned_; }
  const OwnedValues& owned() const { return owned_; }
  HeldReferences& held() { return held_; }
  const HeldReferences& held() const { return held_; }

  /// A reference leaves for `to`: the handle's fork. Nothing when `to` is gone.
  std::optional<GlobalId> send_owner(GlobalId value, const Keep& owner, PeerId to);
  std::optional<GlobalId> send_user(const Keep& user, PeerId to);
  /// The message with that handle could not be sent.
  void unsend(const wire::Handle& handle, Effects& effects);
  /// A handle to a value of ours came from `from`.
  OwnedValues::Found come_home(const wire::Handle& handle, PeerId from, const Keep& fresh, Effects& effects);

  /// A control message; the refusal is the answer to a fork request. `incarnation`: the owner's that a fork
  /// request means.
  std::optional<Refusal> receive(const RRefMessage& message, PeerId from, Effects& effects);

  /// What `peer` holds of ours or is to get: to be asked for after its connection broke.
  Forks forks_at(PeerId peer) const;
  /// `peer` says that it never got that fork.
  void lost(GlobalId value, GlobalId fork, Effects& effects);

  Counts counts() const;
  /// Shutdown: lets go of everything.
  void clear(Effects& effects);

 private:
  PeerId self_;
  std::uint64_t counter_ = 0;
  std::map<std::uint32_t, std::uint64_t> values_;  ///< by owner's rank: those made so far
  Presence presence_;
  OwnedValues owned_{presence_};
  HeldReferences held_{presence_};
};

}  // namespace torchspan::rpc
