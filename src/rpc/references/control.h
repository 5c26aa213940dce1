#pragma once
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/rpc/message.h>

namespace torchspan::rpc {

/// The control messages of the reference protocol (docs/architecture/rref.md); all idempotent, all
/// acknowledged.
struct ForkRequest {
  static constexpr wire::MessageType kType{0x0020};
  static constexpr std::string_view kName = "rref.fork_request";
  static constexpr FixedString kWireName = "rref.ForkRequest";
  using Reply = std::optional<Error>;  ///< why the fork is not counted
  GlobalId value, fork;
  std::uint32_t incarnation = 0;  ///< of the owner that the sender means
  std::uint64_t number = 0;       ///< counts the sender's requests to this owner; copies have the same
};
struct ChildAccept {
  static constexpr wire::MessageType kType{0x0021};
  static constexpr std::string_view kName = "rref.child_accept";
  static constexpr FixedString kWireName = "rref.ChildAccept";
  using Reply = Unit;
  GlobalId value, fork;
};
struct UserDelete {
  static constexpr wire::MessageType kType{0x0022};
  static constexpr std::string_view kName = "rref.user_delete";
  static constexpr FixedString kWireName = "rref.UserDelete";
  using Reply = Unit;
  GlobalId value, fork;
};

/// Sent by a value's creator: the creation failed there and, if it has not arrived, does not count.
struct CreationGivenUp {
  static constexpr wire::MessageType kType{0x0024};
  static constexpr std::string_view kName = "rref.creation_given_up";
  static constexpr FixedString kWireName = "rref.CreationGivenUp";
  using Reply = Unit;
  GlobalId value, fork;
  std::string reason;
};

/// Asks, after a connection broke, which of these forks the receiver does not know: the sender made them for
/// the receiver, or counts them as held by it. The forks in the reply were lost; if one arrives later, it is
/// refused.
struct ForkAudit {
  static constexpr wire::MessageType kType{0x0023};
  static constexpr std::string_view kName = "rref.fork_audit";
  static constexpr FixedString kWireName = "rref.ForkAudit";
  using Reply = std::vector<GlobalId>;
  std::vector<GlobalId> forks;
};

}  // namespace torchspan::rpc
