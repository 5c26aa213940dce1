#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <sys/uio.h>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// The layout of messages on a byte stream, after the handshake. Integers are little-endian:
///
///   frame    u16 0x5354  u8 type  u8 0  u32 segments  u64 header  u64 size[segments]  header bytes  segment
///   bytes…
///
/// Type 1 is a message. Type 2 is a goodbye, all its numbers zero: nothing follows it. If both sides share
/// memory, a size in a message of type 1 may have kLent set: the frame then has the u64 number of a block in
/// place of the segment's bytes, and the bytes are in that block. Only on channels with several lanes: type 3
/// is a message whose segments' bytes are sent over other lanes and are not in the frame; type 4 is a
/// heartbeat, all its numbers zero.
enum class FrameType : std::uint8_t { kMessage = 1, kGoodbye = 2, kStriped = 3, kHeartbeat = 4 };

/// Which types a parser knows.
enum class FrameDialect : std::uint8_t { kPlain, kLanes };

inline constexpr std::size_t kPrefixBytes = 16;
inline constexpr std::uint64_t kLent = std::uint64_t{1} << 63;
inline constexpr std::size_t kBlockNumberBytes = sizeof(std::uint64_t);

/// Makes the Buffer of a segment that is in a block of shared memory. Throws kInvalid for a block that does
/// not exist, is too small, or is lent already; kOverloaded without memory.
using BlockAdopter = std::function<Buffer(std::uint64_t block, std::size_t size)>;

struct FrameLimits {
  std::uint64_t max_header;
  std::uint64_t max_message;
  std::uint32_t max_segments;
  bool device_memory = false;  ///< whether segments may be in device memory
};

/// The limits a transport's options set; `device_memory`: whether its channels carry it.
FrameLimits limits_of(const TransportOptions& options, bool device_memory = false);

/// Returns the size of a message on the wire. Throws kInvalid, naming the limit, for a message beyond the
/// limits, and for segments in device memory that the channel does not carry.
std::uint64_t check_message(BytesView header, std::span<const Segment> segments, const FrameLimits& limits);

/// Allocates `size` bytes from `allocator`. Throws kOverloaded if that fails.
Buffer allocate_segment(const BufferAllocator& allocator, std::size_t size);

/// The bytes before a message's header: prefix and segment sizes. Small messages need no heap.
class FramePrefix {
 public:
  FramePrefix(BytesView header, std::span<const Segment> segments, FrameType type = FrameType::kMessage)
      : FramePrefix(header, segments, type, {}) {}
  /// For a message; `blocks` is empty, or has for each segment the number of the block that holds it, 0 for
  /// none.
  FramePrefix(BytesView header, std::span<const Segment> segments, std::span<const std::uint64_t> blocks)
      : FramePrefix(header, segments, FrameType::kMessage, blocks) {}
  BytesView bytes() const { return bytes_; }

 private:
  FramePrefix(BytesView header, std::span<const Segment> segments, FrameType type,
              std::span<const std::uint64_t> blocks);

  static constexpr std::size_t kInline = 14;
  std::array<std::byte, kPrefixBytes + kInline * sizeof(std::uint64_t)> small_;
  Bytes large_;
  BytesView bytes_;
};

/// The whole frame of a goodbye or a heartbeat.
std::array<std::byte, kPrefixBytes> goodbye_frame();
std::array<std::byte, kPrefixBytes> heartbeat_frame();

/// Turns bytes into messages: pure and incremental. Checks every number against the limits before it
/// allocates memory. Headers and size tables grow only with the bytes that arrived; segments are allocated
/// when their first byte is due. After a throw, the parser must not be used again.
class FrameParser {
 public:
  FrameParser(FrameLimits limits, BufferAllocator allocator, FrameDialect dialect = FrameDialect::kPlain);
  /// Allows lent segments from now on. Must not be called in the middle of a frame.
  void adopt_with(BlockAdopter adopter) { adopter_ = std::move(adopter); }

  /// Takes all bytes, in pieces of any size, and appends the messages they complete. Throws kInvalid for a
  /// frame that is malformed or beyond the limits, kOverloaded if the allocator has no memory; messages
  /// completed before that are in `finished`.
  void feed(BytesView bytes, std::vector<Message>& finished);

  /// Where the next bytes of the stream belong while segments are due: the caller may receive into these
  /// places, in order, instead of feeding. Returns how many were filled in; none between segments. Throws as
  /// feed().
  std::size_t targets(std::span<iovec> places);
  /// The caller received `size` bytes into the places of the last targets().
  void received(std::size_t size, std::vector<Message>& finished);

  /// The striped messages among those finished since the last call: their indexes in `finished`, where they
  /// have no segments, and the sizes of their segments.
  struct Striped {
    std::size_t index;
    std::vector<std::uint64_t> sizes;
  };
  std::vector<Striped> take_striped() { return std::exchange(striped_, {}); }

  /// Whether the stream would end in the middle of a frame if it ended here.
  bool mid_frame() const { return !goodbye() && (stage_ != Stage::kPrefix || filled_ != 0); }
  bool goodbye() const { return stage_ == Stage::kGoodbye; }

 private:
  enum class Stage : std::uint8_t { kPrefix, kSizes, kHeader, kSegments, kGoodbye };

  BytesView feed_number(BytesView bytes, std::size_t size);
  BytesView feed_header(BytesView bytes);
  BytesView feed_segment(BytesView bytes);
  BytesView feed_block(BytesView bytes);
  void take_prefix();
  bool knows(FrameType type) const;
  void take_size();
  void add_to_message(std::uint64_t size);
  void allocate(std::size_t index);
  bool lent(std::size_t index) const { return adopter_ && (sizes_[index] & kLent) != 0; }
  /// Completes all stages that need no further byte.
  void settle(std::vector<Message>& finished);

  const FrameLimits limits_;
  const BufferAllocator allocator_;
  const FrameDialect dialect_;
  BlockAdopter adopter_;
  bool is_striped_ = false;  ///< the message that is being received
  Stage stage_ = Stage::kPrefix;
  std::array<std::byte, kPrefixBytes> number_;  ///< a prefix or a size that is being received
  std::uint64_t filled_ = 0;                    ///< bytes received of the number or of the segment
  std::uint32_t segment_count_ = 0;
  std::uint64_t header_size_ = 0;
  std::uint64_t message_size_ = 0;
  std::vector<std::uint64_t> sizes_;
  std::size_t current_ = 0;  ///< the segment that is being received
  Message message_;
  std::vector<Striped> striped_;
};

}  // namespace torchspan::net
