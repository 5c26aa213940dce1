#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <torchspan/core/bytes.h>

#include "net/handshake.h"

namespace torchspan::net {

/// What tells the connections of one channel from those of another; drawn by the listener.
using ChannelToken = std::array<std::byte, 16>;

/// The first bytes in each direction of every connection, inside TLS. Integers are little-endian:
///
///   hello   u8 magic[8]  u16 lowest  u16 highest  u8 lanes  u8 lane  u16 0  u64 features  u8 token[16]
///
/// Who dials says it first. Lane 0 makes a channel: `lanes` is how many further connections the dialer would
/// make, the token is zero; the answer grants `lanes` of them and gives the channel's token. A further
/// connection says its number (from 1) and that token, and is answered with the same.
struct LaneHello {
  std::uint16_t lowest = kProtocolLowest;
  std::uint16_t highest = kProtocolHighest;
  std::uint8_t lanes = 0;
  std::uint8_t lane = 0;
  std::uint64_t features = 0;
  ChannelToken token{};
  friend bool operator==(const LaneHello&, const LaneHello&) = default;
};

inline constexpr std::size_t kLaneHelloBytes = 40;
inline constexpr std::uint8_t kMostLanes = 16;

Bytes encode(const LaneHello& hello);

/// Throws kInvalid for bytes that are no hello; `peer` is who sent them.
LaneHello decode_lane_hello(BytesView bytes, const std::string& peer);

/// Throws kUnsupported unless the peer speaks a version of this side's.
void check_version(const LaneHello& theirs, const std::string& peer);

}  // namespace torchspan::net
