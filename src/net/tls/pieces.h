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

/// How a striped message travels. Its frame (FrameType::kStriped) on the first lane holds header and segment
/// sizes; its segments' bytes, as one row, are cut into pieces of kPieceBytes, the last one shorter. Each
/// piece goes over any further lane:
///
///   piece   u64 message  u32 index  u32 0  bytes…      message: counts the striped messages from 0
///
/// Pieces of one message come in any order and may come before its frame.
inline constexpr std::uint64_t kPieceBytes = 256 << 10;
inline constexpr std::size_t kPiecePrefixBytes = 16;
inline constexpr std::uint64_t kWorthStriping = 1 << 20;

std::array<std::byte, kPiecePrefixBytes> piece_prefix(std::uint64_t message, std::uint32_t index);
std::uint64_t piece_count(std::uint64_t bytes);

/// The receiving side's messages that wait: striped ones until their pieces are there, and all others behind
/// them. Used by one thread. Memory follows a message's first piece.
class Assembly {
 public:
  explicit Assembly(BufferAllocator allocator) : allocator_(std::move(allocator)) {}

  /// A message whose segments come in pieces. Throws kInvalid for one with too many pieces.
  void expect(Message message, std::vector<std::uint64_t> sizes);
  /// A whole message; it comes after those that came before it.
  void add(Message message);
  bool empty() const { return waiting_.empty(); }
  /// Bytes of whole messages that wait behind a striped one.
  std::uint64_t held_bytes() const { return held_bytes_; }
  /// Moves out what is complete and first.
  void take(std::vector<Message>& finished);

  bool knows(std::uint64_t message) const { return message < announced_; }
  /// A place in a striped message; stays valid until done() was called for its piece.
  struct Piece {
    std::uint64_t message;
    std::uint64_t offset;
    std::uint64_t size;
  };
  /// Reserves a piece of a known message. Throws kInvalid for one that does not exist or came already, and
  /// kOverloaded without memory.
  Piece claim(std::uint64_t message, std::uint32_t index);
  /// Where the rest of `piece` from `done` bytes on belongs; returns how many places were filled in.
  std::size_t places(const Piece& piece, std::uint64_t done, std::span<iovec> places);
  void done(const Piece& piece);

 private:
  struct Waiting {
    Message message;
    std::vector<std::uint64_t> ends;  ///< of the segments in the row of bytes; none for a whole message
    std::vector<bool> claimed;        ///< by piece
    std::uint64_t size = 0;
    std::uint64_t left = 0;  ///< bytes that are not there yet
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

  /// False while the piece that is coming in belongs to a message whose frame has not come yet.
  bool ready() const { return in_piece_ || prefix_filled_ < kPiecePrefixBytes || assembly_.knows(message()); }
  /// Where the next bytes belong, in order; at least one place. Throws as Assembly::claim().
  std::size_t targets(std::span<iovec> places);
  /// Tells how many bytes were received into the places of the last targets().
  void received(std::size_t size);
  bool mid_piece() const { return in_piece_ || prefix_filled_ != 0; }

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
