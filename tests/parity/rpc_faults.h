#pragma once
#include <optional>

#include <torchspan/detail/wire/frame.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::testing {

/// The type of a request between workers; nullopt for replies and for messages of the membership.
inline std::optional<wire::MessageType> request_type(const net::SimMessage& message) {
  if (!message.from.starts_with("sim:worker") || message.from.ends_with(".membership")) return std::nullopt;
  const wire::FrameView frame = wire::decode_frame(message.header);
  if ((frame.header.flags & wire::kFlagReply) != 0) return std::nullopt;
  return frame.header.type;
}
inline net::SimPredicate requests_of(wire::MessageType type) {
  return [type](const net::SimMessage& message) { return request_type(message) == type; };
}

}  // namespace torchspan::testing
