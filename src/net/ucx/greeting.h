#pragma once
#include <cstdint>
#include <string>
#include <variant>

#include <torchspan/core/bytes.h>

namespace torchspan::net {

/// What two UCX transports tell each other inside TLS, each as the header of a message without segments.
/// Integers are little-endian:
///
///   greeting  u32 0x58435554  u8 1  u8 1  u16 0  u32 major  u32 minor  u64 channel  u32 size  address bytes
///   ready     u32 0x58435554  u8 1  u8 2  u16 0
///   farewell  u32 0x58435554  u8 1  u8 3  u16 0
///
/// A greeting says how the sender's end of the channel is labelled, where its UCX worker is, and which UCX it
/// runs. Ready: the peer's greeting is here, it may send through UCX now. Farewell: the peer's goodbye, and all
/// that it sent before, came through UCX.
struct UcxGreeting {
  std::uint32_t major = 0;
  std::uint32_t minor = 0;
  std::uint64_t channel = 0;
  Bytes address;
  friend bool operator==(const UcxGreeting&, const UcxGreeting&) = default;
};
enum class UcxSignal : std::uint8_t { kReady = 2, kFarewell = 3 };
using UcxNote = std::variant<UcxGreeting, UcxSignal>;

/// Notes, worker addresses included, are shorter than this.
inline constexpr std::size_t kLongestNote = 64 << 10;

Bytes encode(const UcxGreeting& greeting);
Bytes encode(UcxSignal signal);

/// Total: a note, or kInvalid naming `peer`.
UcxNote decode_ucx_note(BytesView bytes, const std::string& peer);

/// UCX promises that different versions understand each other's bytes from 1.16 on. Throws kUnsupported.
void check_ucx_versions(const UcxGreeting& theirs, const UcxGreeting& ours, const std::string& peer);

}  // namespace torchspan::net
