#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <limits>

#include <torchspan/detail/wire/frame.h>

#include "core/api/throw_invalid.h"

namespace torchspan::wire {
namespace {

constexpr std::size_t kHandleSize = 40;
constexpr std::size_t kLeastBlobSize = 5;

/// The header's layout in a frame (docs/wire.md); every field is aligned, so there is no padding.
struct RawHeader {
  std::uint32_t magic = kFrameMagic;
  std::uint16_t version = 0;
  std::uint16_t type = 0;
  std::uint32_t flags = 0;
  std::uint32_t features = 0;
  std::uint64_t instance = 0;
  std::uint64_t sequence = 0;
  std::uint64_t call = 0;
  std::int64_t remaining = 0;
  std::uint64_t reserved = 0;
  std::uint32_t value_size = 0;
  std::uint32_t handle_count = 0;
};
static_assert(sizeof(RawHeader) == kFrameHeaderSize && std::has_unique_object_representations_v<RawHeader>);

/// Sizes are sent as 32 bits.
std::uint32_t narrow(std::size_t size, const char* part) {
  if (size > std::numeric_limits<std::uint32_t>::max()) {
    throw_invalid("{} of {} is beyond the frame's limit of 2^32 - 1; send bulk data as tensors", part, size);
  }
  return static_cast<std::uint32_t>(size);
}

std::size_t blobs_size(const std::vector<NamedBlob>& blobs) {
  if (blobs.empty()) return 0;
  std::size_t size = sizeof(std::uint16_t);
  for (const NamedBlob& blob : blobs) size += kLeastBlobSize + blob.name.size() + blob.bytes.size();
  return size;
}

void put_blobs(ByteWriter& writer, const std::vector<NamedBlob>& blobs) {
  if (blobs.size() > std::numeric_limits<std::uint16_t>::max()) {
    throw_invalid("{} named headers do not fit into one frame (65535 do)", blobs.size());
  }
  writer.put(static_cast<std::uint16_t>(blobs.size()));
  for (const NamedBlob& blob : blobs) {
    if (blob.name.size() > 255) {
      throw_invalid("the named header '{}…' has a name of {} bytes; 255 is the limit",
                    blob.name.substr(0, 32), blob.name.size());
    }
    writer.put(static_cast<std::uint8_t>(blob.name.size()));
    writer.put_bytes(std::as_bytes(std::span(blob.name)));
    writer.put(narrow(blob.bytes.size(), "the size of a named header"));
    writer.put_bytes(blob.bytes);
  }
}

std::vector<NamedBlobView> get_blobs(ByteReader& reader) {
  const std::size_t count = reader.get<std::uint16_t>();
  if (count > reader.left() / kLeastBlobSize) {
    throw_invalid("{} named headers are announced but only {} bytes follow", count, reader.left());
  }
  std::vector<NamedBlobView> blobs(count);
  for (NamedBlobView& blob : blobs) {
    const BytesView name = reader.get_bytes(reader.get<std::uint8_t>());
    blob.name = {reinterpret_cast<const char*>(name.data()), name.size()};
    blob.bytes = reader.get_bytes(reader.get<std::uint32_t>());
  }
  return blobs;
}

void put_handle(ByteWriter& writer, const Handle& handle) {
  writer.put(handle.owner);
  writer.put(handle.value.worker);
  writer.put(handle.value.local);
  writer.put(handle.fork.worker);
  writer.put(handle.fork.local);
  writer.put(handle.type_tag);
  writer.put(handle.incarnation);
}

Handle get_handle(ByteReader& reader) {
  Handle handle;
  handle.owner = reader.get<std::uint32_t>();
  handle.value.worker = reader.get<std::uint32_t>();
  handle.value.local = reader.get<std::uint64_t>();
  handle.fork.worker = reader.get<std::uint32_t>();
  handle.fork.local = reader.get<std::uint64_t>();
  handle.type_tag = reader.get<std::uint64_t>();
  handle.incarnation = reader.get<std::uint32_t>();
  return handle;
}

/// Throws unless this worker can read the version and features in the header.
void check_header(const RawHeader& raw, const ProtocolRange& spoken) {
  if (raw.magic != kFrameMagic) {
    throw_invalid("not a TorchSpan frame: the bytes do not begin with 'TSPN'");
  }
  constexpr const char* kAdvice =
      "install the same release of TorchSpan on all hosts, or two neighboring ones";
  if (!spoken.speaks(raw.version)) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("the frame is of wire version {}, this worker speaks {}; {}", raw.version,
                            describe_versions(spoken), kAdvice));
  }
  if ((raw.features & ~spoken.features) != 0) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("the frame uses features {:#x}, this worker has {:#x}; {}", raw.features,
                            spoken.features, kAdvice));
  }
}

}  // namespace

Bytes encode_frame(const Frame& frame) {
  const FrameHeader& header = frame.header;
  const bool has_blobs = !frame.blobs.empty();
  RawHeader raw;
  raw.version = header.version;
  raw.type = static_cast<std::uint16_t>(header.type);
  raw.flags = (header.flags & ~std::uint32_t{kFlagHasBlobs}) | (has_blobs ? kFlagHasBlobs : 0u);
  raw.features = header.features;
  raw.instance = header.instance;
  raw.sequence = header.sequence;
  raw.call = header.call;
  raw.remaining = header.remaining;
  raw.value_size = narrow(frame.value.size(), "the size of the value");
  raw.handle_count = narrow(frame.handles.size(), "the number of references");
  Bytes room;
  room.reserve(kFrameHeaderSize + blobs_size(frame.blobs) + frame.handles.size() * kHandleSize +
               frame.value.size() + frame.tensor_metadata.size());
  ByteWriter writer(std::move(room));
  writer.put_bytes(std::as_bytes(std::span(&raw, 1)));
  if (has_blobs) put_blobs(writer, frame.blobs);
  for (const Handle& handle : frame.handles) put_handle(writer, handle);
  writer.put_bytes(frame.value);
  writer.put_bytes(frame.tensor_metadata);
  return writer.take();
}

FrameView decode_frame(BytesView bytes, const ProtocolRange& spoken) {
  if (bytes.size() < kFrameHeaderSize) {
    throw_invalid("{} bytes are shorter than a frame's header of {}", bytes.size(), kFrameHeaderSize);
  }
  ByteReader reader(bytes);
  RawHeader raw;
  std::memcpy(&raw, reader.get_bytes(kFrameHeaderSize).data(), kFrameHeaderSize);
  check_header(raw, spoken);
  FrameView frame;
  frame.header = {raw.version,  static_cast<MessageType>(raw.type),
                  raw.flags,    raw.features,
                  raw.instance, raw.sequence,
                  raw.call,     raw.remaining};
  if ((raw.flags & kFlagHasBlobs) != 0) frame.blobs = get_blobs(reader);
  if (raw.handle_count > reader.left() / kHandleSize) {
    throw_invalid("{} references are announced but only {} bytes follow", raw.handle_count, reader.left());
  }
  frame.handles.reserve(raw.handle_count);
  for (std::size_t i = 0; i < raw.handle_count; ++i) frame.handles.push_back(get_handle(reader));
  frame.value = reader.get_bytes(raw.value_size);
  frame.tensor_metadata = reader.get_bytes(reader.left());
  return frame;
}

const NamedBlobView* FrameView::blob(std::string_view name) const {
  const auto found = std::ranges::find(blobs, name, &NamedBlobView::name);
  return found == blobs.end() ? nullptr : &*found;
}

}  // namespace torchspan::wire
