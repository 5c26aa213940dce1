#pragma once
#include <cstdint>
#include <string>
#include <variant>

#include <torchspan/core/bytes.h>

namespace torchspan::net {

/// Notes between two UCX transports inside TLS, each the header of a message without segments. Integers are
/// little-endian:
///
///   greeting  u32 0x58435554  u8 1  u8 1  u16 0  u32 major  u32 minor  u64 channel  u32 size  address bytes
///   farewell  u32 0x58435554  u8 1  u8 2  u16 0
///
/// A greeting holds the label of the sender's end of the channel, the address of its UCX worker, and its UCX
/// version. The accepting side greets first; the dialing side answers. A farewell confirms that the peer's
/// goodbye, and all bytes before it, arrived through UCX.
struct UcxGreeting {
  std::uint32_t major = 0;
  std::uint32_t minor = 0;
  std::uint64_t channel = 0;
  Bytes address;
  friend bool operator==(const UcxGreeting&, const UcxGreeting&) = default;
};
struct UcxFarewell {
  friend bool operator==(const UcxFarewell&, const UcxFarewell&) = default;
};
using UcxNote = std::variant<UcxGreeting, UcxFarewell>;

/// Notes, worker addresses included, are shorter than this.
inline constexpr std::size_t kLongestNote = 64 << 10;

Bytes encode(const UcxGreeting& greeting);
Bytes encode(const UcxFarewell& farewell);

/// Returns a note, or throws kInvalid, which names `peer`, for any other bytes.
UcxNote decode_ucx_note(BytesView bytes, const std::string& peer);

/// Throws kUnsupported unless the two versions are compatible: equal, or both at least 1.16.
void check_ucx_versions(const UcxGreeting& theirs, const UcxGreeting& ours, const std::string& peer);

}  // namespace torchspan::net
