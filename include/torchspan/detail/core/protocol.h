#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include <torchspan/core/bytes.h>

/// Versions of the protocols between processes. A release supports its own version of a protocol and, if possible, that
/// of the release before it (docs/versions.md).
namespace torchspan {

/// What two processes use of a protocol: the newest version and the optional features that both have.
struct Protocol {
  std::uint16_t version = 1;
  std::uint32_t features = 0;
  /// Whether both have all features of the mask.
  bool has(std::uint32_t mask) const { return (features & mask) == mask; }
  friend bool operator==(const Protocol&, const Protocol&) = default;
};

/// What one process announces: the versions that it supports, and a bit for each optional feature that it can read.
struct ProtocolRange {
  std::uint16_t oldest = 1;
  std::uint16_t newest = 1;
  std::uint32_t features = 0;
  bool speaks(std::uint16_t version) const { return oldest <= version && version <= newest; }
  friend bool operator==(const ProtocolRange&, const ProtocolRange&) = default;
};

/// Nullopt if there is no common version.
std::optional<Protocol> common_protocol(const ProtocolRange& one, const ProtocolRange& other);

/// "version 2", or "versions 1 to 2".
std::string describe_versions(const ProtocolRange& range);

/// u16 oldest, u16 newest, u32 features. Reading throws Error{kInvalid} for a range without a version.
void put_range(ByteWriter& writer, const ProtocolRange& range);
ProtocolRange get_range(ByteReader& reader);
inline constexpr std::size_t kRangeBytes = 8;

/// The worker reads parts of tensors in device memory (docs/wire.md).
inline constexpr std::uint32_t kPartsInDeviceMemory = 1u << 0;
/// The wire format between workers that this release supports (docs/wire.md). tests/wire_versions has its bytes.
inline constexpr ProtocolRange kWireProtocol{.features = kPartsInDeviceMemory};
/// The protocol between the workers and rank 0's store (docs/wire.md).
inline constexpr ProtocolRange kStoreProtocol{};

}  // namespace torchspan
