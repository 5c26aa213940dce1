#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <sys/uio.h>
#include <unordered_map>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// The layout of a striped message. Its frame (FrameType::kStriped) on the first lane holds the header and
/// the segment sizes; the bytes of all segments together are cut into pieces of kPieceBytes, the last one
/// shorter. Each piece is sent over any further lane:
///
///   piece   u64 message  u32 index  u32 0  bytes…      message: counts the striped messages from 0
///
/// Pieces of one message arrive in any order and may arrive before its frame.
inline constexpr std::uint64_t kPieceBytes = 256 << 10;
inline constexpr std::size_t kPiecePrefixBytes = 16;
inline constexpr std::uint64_t kWorthStriping = 1 << 20;

std::array<std::byte, kPiecePrefixBytes> piece_prefix(std::uint64_t message, std::uint32_t index);
std::uint64_t piece_count(std::uint64_t bytes);

/// Received messages that wait: striped ones for their pieces, and later messages for them. For the driver.
/// Allocates a message's memory at its first piece.
class Assembly {
 public:
  explicit Assembly(BufferAllocator allocator) : allocator_(std::move(allocator)) {}

  /// Adds a message whose segments arrive in pieces. Throws kInvalid for too many pieces.
  void expect(Message message, std::vector<std::uint64_t> sizes);
  /// Adds a complete message, behind those that arrived before it.
  void add(Message message);
  bool empty() const { return waiting_.empty(); }
  /// Bytes of complete messages that wait behind a striped one.
  std::uint64_t held_bytes() const { return held_bytes_; }
  /// Moves out the complete messages at the front.
  void take(std::vector<Message>& finished);

  bool knows(std::uint64_t message) const { return message < announced_; }
  /// A piece of a striped message; valid until done() is called for it.
  struct Piece {
    std::uint64_t message;
    std::uint64_t offset;
    std::uint64_t size;
  };
  /// Reserves a piece of a known message. Throws kInvalid for a piece that does not exist or arrived before,
  /// kOverloaded without memory.
  Piece claim(std::uint64_t message, std::uint32_t index);
  /// Fills in the places of the rest of `piece`, from `done` bytes on; returns how many.
  std::size_t places(const Piece& piece, std::uint64_t done, std::span<iovec> places);
  void done(const Piece& piece);

 private:
  struct Waiting {
    Message message;
    std::vector<std::uint64_t>
        ends;                   ///< of the segments in the sequence of bytes; none for a complete message
    std::vector<bool> claimed;  ///< by piece
    std::uint64_t size = 0;
    std::uint64_t left = 0;  ///< bytes that have not arrived yet
  };
  void allocate(Waiting& waiting);

  const BufferAllocator allocator_;
  std::deque<std::unique_ptr<Waiting>> waiting_;
  std::unordered_map<std::uint64_t, Waiting*> open_;  ///< striped and incomplete, by number
  std::uint64_t announced_ = 0;
  std::uint64_t held_bytes_ = 0;
};

/// Reads the pieces on one lane: pure and incremental. Before each targets(), ready() must be true.
class PieceReader {
 public:
  explicit PieceReader(Assembly& assembly) : assembly_(assembly) {}

  /// False while the frame of the current piece's message has not arrived yet.
  bool ready() const { return in_piece_ || prefix_filled_ < kPiecePrefixBytes || assembly_.knows(message()); }
  /// Where the next bytes belong, in order; at least one place. Throws as Assembly::claim().
  std::size_t targets(std::span<iovec> places);
  /// The caller received `size` bytes into the places of the last targets().
  void received(std::size_t size);

 private:
  std::uint64_t message() const;
  void begin();

  Assembly& assembly_;
  std::array<std::byte, kPiecePrefixBytes> prefix_;
  std::size_t prefix_filled_ = 0;
  bool in_piece_ = false;
  Assembly::Piece piece_{};
  std::uint64_t done_ = 0;
};

}  // namespace torchspan::net
