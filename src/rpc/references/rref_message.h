#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/wire/frame.h>

#include "rpc/references/presence.h"

namespace torchspan::rpc {

/// A control message of the reference protocol. The driver of the table sends it repeatedly until it is
/// answered or its receiver is gone. Idempotent.
struct RRefMessage {
  enum class Kind : std::uint8_t {
    kForkRequest,  ///< user -> owner: this fork of the value exists, and the sender holds it
    kChildAccept,  ///< child -> parent: the owner knows the child; release the parent
    kUserDelete,   ///< user -> owner: this fork is gone
    kGivenUp,      ///< creator -> owner: the creation failed at the creator; if it has not arrived, ignore it
  };
  Kind kind = Kind::kForkRequest;
  PeerId to;
  GlobalId value;
  GlobalId fork;
  std::uint64_t number = 0;  ///< fork requests: counts those to this owner, to recognize copies
  std::string reason;        ///< kGivenUp: why
  friend bool operator==(const RRefMessage&, const RRefMessage&) = default;
};

/// Why a reference cannot be counted or a value is not available.
struct Refusal {
  enum class Why : std::uint8_t {
    kReleased,         ///< no worker that the owner knew of held it any more
    kHolderDeparted,   ///< the same; the last holder, `who`, died or left
    kCreatorDeparted,  ///< the value's creator is gone; the value never arrived, or ended with its holders
    kGivenUp,          ///< its creator gave up the creation before it arrived: `text`
    kOtherOwner,       ///< its owner was a process that had the owner's rank before
    kOwnerDeparted,    ///< the owner died or left
    kSenderDeparted,   ///< the sender has died or left, and the reference was not counted
    kSentTwice,        ///< the sender, `who`, sent the number of a reference that is here
  };
  Why why = Why::kReleased;
  PeerId who;
  std::string text;
  friend bool operator==(const Refusal&, const Refusal&) = default;
};

/// What an operation on a table leaves for its driver to do outside its lock.
struct RRefEffects {
  using Keep = std::shared_ptr<void>;
  struct Failed {
    Keep reference;
    Refusal why;
  };
  std::vector<RRefMessage> messages;  ///< to be sent
  std::vector<Keep> released;         ///< to be destroyed
  std::vector<Failed> failed;         ///< to be failed, because their value never arrives, and destroyed
};

/// The first bit of the creator's incarnation in a value's id; the bits below it are the value's number. A
/// creator numbers the values that it makes on each owner one by one, so that the owner needs little memory
/// to know which creations arrived.
inline constexpr int kIncarnationShift = 40;
inline PeerId creator_of(GlobalId value) {
  return {value.worker, static_cast<std::uint32_t>(value.local >> kIncarnationShift)};
}
inline std::uint64_t number_of(GlobalId value) {
  return value.local & ((std::uint64_t{1} << kIncarnationShift) - 1);
}

}  // namespace torchspan::rpc
