#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/core/protocol.h>

namespace torchspan::wire {

inline constexpr std::uint32_t kFrameMagic = 0x4E505354;  ///< the bytes "TSPN"
inline constexpr std::size_t kFrameHeaderSize = 64;

/// Type of a frame. Numbers never change meaning; docs/wire.md lists the range of each component.
enum class MessageType : std::uint16_t {};

/// Bits of FrameHeader::flags. Readers ignore unknown bits.
enum FrameFlag : std::uint32_t {
  kFlagReply = 1u << 0,        ///< answers the call `call`
  kFlagError = 1u << 1,        ///< the value is an Error
  kFlagOneWay = 1u << 2,       ///< no reply is expected
  kFlagHasDeadline = 1u << 3,  ///< `remaining` is valid
  kFlagHasBlobs = 1u << 5,     ///< named blobs follow; set by encode_frame
};

/// Fixed-size part of every message.
struct FrameHeader {
  std::uint16_t version = kWireProtocol.newest;  ///< the newest one that both ends support
  MessageType type{};
  std::uint32_t flags = 0;     ///< FrameFlag bits
  std::uint32_t features = 0;  ///< encodings used; the receiver must know them all
  std::uint64_t instance = 0;  ///< of the sending worker; differs after a restart
  std::uint64_t sequence = 0;  ///< in the sender's stream, to detect duplicates
  std::uint64_t call = 0;      ///< links a reply to its request
  std::int64_t remaining = 0;  ///< nanoseconds to the deadline when sent (clocks differ)
  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

/// Data that an interceptor adds to a message, under its name.
struct NamedBlob {
  std::string name;  ///< at most 255 bytes
  Bytes bytes;
};

/// A reference on the wire: the owner, the value, the fork and the value's type.
struct Handle {
  std::uint32_t owner = 0;  ///< the owner's rank
  GlobalId value;
  GlobalId fork;
  std::uint64_t type_tag = 0;     ///< type_tag<T>()
  std::uint32_t incarnation = 0;  ///< of the owner: processes that held its rank before it
  friend bool operator==(const Handle&, const Handle&) = default;
};

/// A message to send; its tensors' bytes are sent with it as the transport's segments.
struct Frame {
  FrameHeader header;
  std::vector<NamedBlob> blobs;
  std::vector<Handle> handles;
  Bytes value;            ///< Payload::value
  Bytes tensor_metadata;  ///< PackedTensors::metadata
};

/// Encodes a frame. Throws Error{kInvalid} for a blob name over 255 bytes or a part of 4 GiB or more.
Bytes encode_frame(const Frame& frame);

/// A blob of a received frame; views its bytes.
struct NamedBlobView {
  std::string_view name;
  BytesView bytes;
};

/// A received message; valid as long as the bytes it was decoded from.
struct FrameView {
  FrameHeader header;
  std::vector<NamedBlobView> blobs;
  std::vector<Handle> handles;
  BytesView value;
  BytesView tensor_metadata;

  /// The blob of that name, or null.
  const NamedBlobView* blob(std::string_view name) const;
};

/// Decodes a frame without copying its parts. Throws Error{kInvalid} for malformed bytes, and
/// Error{kUnsupported} for a protocol version outside `spoken` (naming both) or features that it lacks.
FrameView decode_frame(BytesView bytes, const ProtocolRange& spoken = kWireProtocol);

}  // namespace torchspan::wire
