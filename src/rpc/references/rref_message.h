#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/wire/frame.h>

#include "rpc/references/presence.h"

namespace torchspan::rpc {

/// A control message of the reference protocol, to be sent by whoever drives the table, again and again until
/// it is answered or its receiver is gone. Idempotent.
struct RRefMessage {
  enum class Kind : std::uint8_t {
    kForkRequest,  ///< user -> owner: this fork of the value exists, and I hold it
    kChildAccept,  ///< child -> parent: the owner knows the child, let go of it
    kUserDelete,   ///< user -> owner: this fork is gone
    kGivenUp,      ///< creator -> owner: the creation failed for me; if it has not come, it is not to count
  };
  Kind kind = Kind::kForkRequest;
  PeerId to;
  GlobalId value;
  GlobalId fork;
  std::uint64_t number = 0;  ///< fork requests: counts those to this owner, to know copies of one by
  std::string reason;        ///< kGivenUp: why
  friend bool operator==(const RRefMessage&, const RRefMessage&) = default;
};

/// Why a reference cannot be counted or a value cannot be had.
struct Refusal {
  enum class Why : std::uint8_t {
    kLetGo,        ///< nobody that the owner knew of held it any more
    kHolderGone,   ///< the same; the last that let go of it was a worker that died or left: `who`
    kCreatorGone,  ///< the value's creator is gone: it never came, or went with its holders
    kGivenUp,      ///< its creator gave the creation up before it came: `text`
    kOtherOwner,   ///< it belonged to a process that had the owner's rank before
    kOwnerGone,    ///< the owner died or left
    kSenderGone,   ///< who sent the reference has died or left, and it was not counted
  };
  Why why = Why::kLetGo;
  PeerId who;
  std::string text;
  friend bool operator==(const Refusal&, const Refusal&) = default;
};

/// What an operation on a table leaves to its driver, to be done outside its lock.
struct RRefEffects {
  using Keep = std::shared_ptr<void>;
  struct Failed {
    Keep reference;
    Refusal why;
  };
  std::vector<RRefMessage> messages;  ///< to be sent
  std::vector<Keep> released;         ///< to be destroyed
  std::vector<Failed> failed;         ///< to be told that their value never comes, and destroyed
};

/// The numbers in a value's id: its creator counts the values that it makes on each owner, one by one, so
/// that the owner knows in little memory which creations came.
inline constexpr int kIncarnationShift = 40;
inline PeerId creator_of(GlobalId value) {
  return {value.worker, static_cast<std::uint32_t>(value.local >> kIncarnationShift)};
}
inline std::uint64_t number_of(GlobalId value) {
  return value.local & ((std::uint64_t{1} << kIncarnationShift) - 1);
}

}  // namespace torchspan::rpc
