#include "net/framing.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include "core/api/throw_invalid.h"

namespace torchspan::net {
namespace {

constexpr std::uint16_t kFrameMagic = 0x5354;
/// Memory is reserved for announced bytes only up to here, before they arrive.
constexpr std::size_t kFirstReserve = 4096;

struct Prefix {
  std::uint16_t magic;
  FrameType type;
  std::uint8_t zero;
  std::uint32_t segments;
  std::uint64_t header;
};
static_assert(sizeof(Prefix) == kPrefixBytes && std::endian::native == std::endian::little);

std::array<std::byte, kPrefixBytes> bare_frame(FrameType type) {
  const Prefix prefix{kFrameMagic, type, 0, 0, 0};
  std::array<std::byte, kPrefixBytes> bytes;
  std::memcpy(bytes.data(), &prefix, kPrefixBytes);
  return bytes;
}

[[noreturn]] void throw_limit(const char* what, std::uint64_t size, const char* option, std::uint64_t limit) {
  throw_invalid(
      "a message with {} {} is beyond this worker's limit of {}; raise TransportOptions::{} on both sides if "
      "it is intended",
      size, what, limit, option);
}

}  // namespace

FrameLimits limits_of(const TransportOptions& options, bool device_memory) {
  return {options.max_header, options.max_message, options.max_segments, device_memory};
}

std::uint64_t check_message(BytesView header, std::span<const Segment> segments, const FrameLimits& limits) {
  if (header.size() > limits.max_header) {
    throw_limit("bytes of header", header.size(), "max_header", limits.max_header);
  }
  if (segments.size() > limits.max_segments) {
    throw_limit("segments", segments.size(), "max_segments", limits.max_segments);
  }
  std::uint64_t size = header.size();
  for (const Segment& segment : segments) {
    size += segment.size;
    if (segment.device_target == 0) continue;
    if (!limits.device_memory || segment.device_target >= kDeviceTargets || segment.size == 0 ||
        !segment.keep)
      throw_invalid("a message has a segment in device memory, which this connection does not carry");
  }
  if (size > limits.max_message) throw_limit("bytes", size, "max_message", limits.max_message);
  return size + kPrefixBytes + segments.size() * sizeof(std::uint64_t);
}

Buffer allocate_segment(const BufferAllocator& allocator, std::size_t size) {
  Buffer buffer = allocator(size);
  if (buffer.size < size || (size != 0 && buffer.data == nullptr)) {
    throw Error(ErrorKind::kOverloaded, fmt::format("no memory for a received segment of {} bytes", size));
  }
  buffer.size = size;
  return buffer;
}

FramePrefix::FramePrefix(BytesView header, std::span<const Segment> segments, FrameType type,
                         std::span<const std::uint64_t> blocks) {
  const Prefix prefix{kFrameMagic, type, 0, static_cast<std::uint32_t>(segments.size()), header.size()};
  const std::size_t size = kPrefixBytes + segments.size() * sizeof(std::uint64_t);
  std::byte* to = small_.data();
  if (size > small_.size()) {
    large_.resize(size);
    to = large_.data();
  }
  bytes_ = {to, size};
  std::memcpy(to, &prefix, kPrefixBytes);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const bool lent = !blocks.empty() && blocks[i] != 0;
    const std::uint64_t length = segments[i].size | (lent ? kLent : 0);
    std::memcpy(to + kPrefixBytes + i * sizeof length, &length, sizeof length);
  }
}

std::array<std::byte, kPrefixBytes> goodbye_frame() { return bare_frame(FrameType::kGoodbye); }
std::array<std::byte, kPrefixBytes> heartbeat_frame() { return bare_frame(FrameType::kHeartbeat); }

FrameParser::FrameParser(FrameLimits limits, BufferAllocator allocator, FrameDialect dialect)
    : limits_(limits), allocator_(std::move(allocator)), dialect_(dialect) {}

void FrameParser::feed(BytesView bytes, std::vector<Message>& finished) {
  while (!bytes.empty()) {
    switch (stage_) {
      case Stage::kPrefix:
        bytes = feed_number(bytes, kPrefixBytes);
        if (filled_ == kPrefixBytes) take_prefix();
        break;
      case Stage::kSizes:
        bytes = feed_number(bytes, sizeof(std::uint64_t));
        if (filled_ == sizeof(std::uint64_t)) take_size();
        break;
      case Stage::kHeader:
        bytes = feed_header(bytes);
        break;
      case Stage::kSegments:
        bytes = feed_segment(bytes);
        break;
      case Stage::kGoodbye:
        throw_invalid("received bytes after the goodbye");
    }
    settle(finished);
  }
}

BytesView FrameParser::feed_number(BytesView bytes, std::size_t size) {
  const std::size_t taken = std::min<std::size_t>(bytes.size(), size - filled_);
  std::memcpy(number_.data() + filled_, bytes.data(), taken);
  filled_ += taken;
  return bytes.subspan(taken);
}

bool FrameParser::knows(FrameType type) const {
  switch (type) {
    case FrameType::kMessage:
    case FrameType::kGoodbye:
      return true;
    case FrameType::kStriped:
    case FrameType::kHeartbeat:
      return dialect_ == FrameDialect::kLanes;
  }
  return false;
}

void FrameParser::take_prefix() {
  Prefix prefix;
  std::memcpy(&prefix, number_.data(), kPrefixBytes);
  filled_ = 0;
  const bool is_bare = prefix.type == FrameType::kGoodbye || prefix.type == FrameType::kHeartbeat;
  if (prefix.magic != kFrameMagic || prefix.zero != 0 || !knows(prefix.type) ||
      (is_bare && (prefix.segments != 0 || prefix.header != 0))) {
    throw_invalid("received bytes that are not a frame (magic {:#06x}, type {})", prefix.magic,
                  static_cast<unsigned>(prefix.type));
  }
  if (is_bare) {
    if (prefix.type == FrameType::kGoodbye) stage_ = Stage::kGoodbye;
    return;
  }
  is_striped_ = prefix.type == FrameType::kStriped;
  if (prefix.segments > limits_.max_segments) {
    throw_limit("segments", prefix.segments, "max_segments", limits_.max_segments);
  }
  if (prefix.header > limits_.max_header) {
    throw_limit("bytes of header", prefix.header, "max_header", limits_.max_header);
  }
  segment_count_ = prefix.segments;
  header_size_ = prefix.header;
  message_size_ = 0;
  add_to_message(header_size_);
  sizes_.clear();
  sizes_.reserve(std::min<std::size_t>(segment_count_, kFirstReserve));
  message_.header.reserve(std::min<std::size_t>(header_size_, kFirstReserve));
  stage_ = Stage::kSizes;
}

void FrameParser::take_size() {
  std::uint64_t size;
  std::memcpy(&size, number_.data(), sizeof size);
  filled_ = 0;
  add_to_message(adopter_ && !is_striped_ ? size & ~kLent : size);
  sizes_.push_back(size);
}

void FrameParser::add_to_message(std::uint64_t size) {
  if (size > limits_.max_message - message_size_)
    throw_limit("bytes", size, "max_message", limits_.max_message);
  message_size_ += size;
}

BytesView FrameParser::feed_header(BytesView bytes) {
  const std::size_t taken = std::min<std::size_t>(bytes.size(), header_size_ - message_.header.size());
  message_.header.insert(message_.header.end(), bytes.begin(),
                         bytes.begin() + static_cast<std::ptrdiff_t>(taken));
  return bytes.subspan(taken);
}

BytesView FrameParser::feed_segment(BytesView bytes) {
  if (lent(current_)) return feed_block(bytes);
  allocate(current_);
  const std::size_t taken = std::min<std::size_t>(bytes.size(), sizes_[current_] - filled_);
  std::memcpy(message_.segments[current_].data + filled_, bytes.data(), taken);
  filled_ += taken;
  return bytes.subspan(taken);
}

BytesView FrameParser::feed_block(BytesView bytes) {
  bytes = feed_number(bytes, kBlockNumberBytes);
  if (filled_ < kBlockNumberBytes) return bytes;
  std::uint64_t block;
  std::memcpy(&block, number_.data(), sizeof block);
  message_.segments.push_back(adopter_(block, sizes_[current_] & ~kLent));
  ++current_;
  filled_ = 0;
  return bytes;
}

void FrameParser::allocate(std::size_t index) {
  while (message_.segments.size() <= index) {
    message_.segments.push_back(allocate_segment(allocator_, sizes_[message_.segments.size()]));
  }
}

void FrameParser::settle(std::vector<Message>& finished) {
  if (stage_ == Stage::kSizes && sizes_.size() == segment_count_) stage_ = Stage::kHeader;
  if (stage_ == Stage::kHeader && message_.header.size() == header_size_) {
    stage_ = Stage::kSegments;
    current_ = 0;
  }
  if (stage_ != Stage::kSegments) return;
  if (is_striped_) {
    striped_.push_back({finished.size(), std::exchange(sizes_, {})});
    current_ = segment_count_;
  }
  while (current_ < segment_count_ && filled_ == sizes_[current_]) {
    allocate(current_++);
    filled_ = 0;
  }
  if (current_ < segment_count_) return;
  finished.push_back(std::exchange(message_, {}));
  stage_ = Stage::kPrefix;
}

std::size_t FrameParser::targets(std::span<iovec> places) {
  if (stage_ != Stage::kSegments) return 0;
  std::size_t count = 0;
  std::uint64_t offset = filled_;
  for (std::size_t i = current_; i < segment_count_ && count < places.size(); ++i, offset = 0) {
    if (lent(i)) break;
    allocate(i);
    if (sizes_[i] != 0) places[count++] = {message_.segments[i].data + offset, sizes_[i] - offset};
  }
  return count;
}

void FrameParser::received(std::size_t size, std::vector<Message>& finished) {
  while (size != 0) {
    const std::size_t taken = std::min<std::size_t>(size, sizes_[current_] - filled_);
    filled_ += taken;
    size -= taken;
    if (filled_ < sizes_[current_]) return;
    filled_ = 0;
    ++current_;
  }
  settle(finished);
}

}  // namespace torchspan::net
