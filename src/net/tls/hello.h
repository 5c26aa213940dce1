#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <torchspan/core/bytes.h>

#include "net/handshake.h"

namespace torchspan::net {

/// Identifies the channel of a connection; the listener draws it at random.
using ChannelToken = std::array<std::byte, 16>;

/// The first bytes in each direction of every connection, inside TLS. Integers are little-endian:
///
///   hello   u8 magic[8]  u16 lowest  u16 highest  u8 lanes  u8 lane  u16 0  u64 features  u8 token[16]
///
/// The dialer sends it first. Lane 0 makes a channel: `lanes` is the number of further connections that the
/// dialer asks for, and the token is zero; the answer grants `lanes` of them and holds the channel's token. A
/// further connection sends its number (from 1) and that token; the answer is the same. After a hello of lane 0,
/// kProbeBytes zeros follow: a path that loses large packets loses these.
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
inline constexpr std::size_t kProbeBytes = 64 << 10;
/// Feature: sends no encryption after the greetings (TcpNetwork::kIsolated).
inline constexpr std::uint64_t kSendsUnencrypted = 1;
inline constexpr std::uint8_t kMostLanes = 16;

Bytes encode(const LaneHello& hello);

/// Throws kInvalid for bytes that are not a hello; errors name `peer`.
LaneHello decode_lane_hello(BytesView bytes, const std::string& peer);

/// Throws kUnsupported unless both sides support a common version, and kDenied unless both or neither encrypt.
void check_agreement(const LaneHello& mine, const LaneHello& theirs, const std::string& peer);

/// The size of the probe after `hello`.
inline std::size_t probe_bytes(const LaneHello& hello) { return hello.lane == 0 ? kProbeBytes : 0; }

}  // namespace torchspan::net
