#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>

namespace torchspan::wire {

inline constexpr std::uint32_t kFrameMagic = 0x4E505354;  ///< the bytes "TSPN"
inline constexpr std::uint16_t kProtocolVersion = 1;
inline constexpr std::size_t kFrameHeaderSize = 64;
/// Features that this build can read; a frame that uses another one is refused. None exists yet.
inline constexpr std::uint32_t kKnownFeatures = 0;

/// What a frame is about. A number belongs to the room that declares it and never changes meaning;
/// docs/wire.md says which room has which range.
enum class MessageType : std::uint16_t {};

/// Bits of FrameHeader::flags. A reader ignores bits that it does not know.
enum FrameFlag : std::uint32_t {
  kFlagReply = 1u << 0,        ///< answers the call `call`
  kFlagError = 1u << 1,        ///< the value is an Error
  kFlagOneWay = 1u << 2,       ///< nobody waits for a reply
  kFlagHasDeadline = 1u << 3,  ///< `remaining` counts
  kFlagHasBlobs = 1u << 5,     ///< named headers follow: set by encode_frame, as the frame needs it
};

/// The fixed part of every message.
struct FrameHeader {
  std::uint16_t version = kProtocolVersion;
  MessageType type{};
  std::uint32_t flags = 0;     ///< FrameFlag bits
  std::uint32_t features = 0;  ///< optional encodings this frame uses; the receiver must know them all
  std::uint64_t instance = 0;  ///< of the sending worker: differs after a restart
  std::uint64_t sequence = 0;  ///< of the sender's message stream, for duplicates
  std::uint64_t call = 0;      ///< joins a reply to its request
  std::int64_t remaining =
      0;  ///< nanoseconds to the deadline when sent; clocks differ, so never a time of day
  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

/// What an interceptor adds to a message, under its own name.
struct NamedBlob {
  std::string name;  ///< at most 255 bytes
  Bytes bytes;
};

/// A reference as it travels: who owns the value, which value, which fork of it, and of what type.
struct Handle {
  std::uint32_t owner = 0;  ///< the owner's rank
  GlobalId value;
  GlobalId fork;
  std::uint64_t type_tag = 0;     ///< type_tag<T>()
  std::uint32_t incarnation = 0;  ///< the owner's: how many processes held its rank before it
  friend bool operator==(const Handle&, const Handle&) = default;
};

/// A message before it is sent; its tensors' bytes travel beside it as the transport's segments.
struct Frame {
  FrameHeader header;
  std::vector<NamedBlob> blobs;
  std::vector<Handle> handles;
  Bytes value;            ///< Payload::value
  Bytes tensor_metadata;  ///< PackedTensors::metadata
};

/// A frame's bytes. Throws Error{kInvalid} for a blob name over 255 bytes or a part of 4 GiB and more.
Bytes encode_frame(const Frame& frame);

/// A blob of a received frame; views into its bytes.
struct NamedBlobView {
  std::string_view name;
  BytesView bytes;
};

/// A received message; its views are valid as long as the bytes it was decoded from.
struct FrameView {
  FrameHeader header;
  std::vector<NamedBlobView> blobs;
  std::vector<Handle> handles;
  BytesView value;
  BytesView tensor_metadata;

  /// The blob of that name, or null.
  const NamedBlobView* blob(std::string_view name) const;
};

/// Reads a frame without copying its parts. Throws Error{kInvalid} for anything that is not one, and
/// Error{kUnsupported} for one of another protocol version (naming both) or with features unknown here.
FrameView decode_frame(BytesView bytes);

}  // namespace torchspan::wire
