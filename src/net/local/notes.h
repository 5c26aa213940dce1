#pragma once
#include <cstdint>
#include <deque>
#include <span>

#include <torchspan/core/bytes.h>

#include "core/api/descriptor.h"
#include "net/local/local_faults.h"

namespace torchspan::net {

/// Notes on the socket of two local transports while frames use the rings. Fixed sizes, little-endian:
///
///   wake     u8 1                                   the ring has news
///   block    u8 2  u8 0[7]  u64 number  u64 bytes   with the descriptor of its memory
///   retired  u8 3  u8 0[7]  u64 number  u64 0       the block is not used any longer
struct Note {
  enum class Kind : std::uint8_t { kWake = 1, kBlock = 2, kRetired = 3 };
  Kind kind;
  std::uint64_t number = 0;
  std::uint64_t size = 0;
  Descriptor descriptor = {};
};
inline constexpr std::size_t kNoteBytes = 24;

/// Sends all bytes in one call, with `descriptor` unless that is -1. Returns false if they were not sent: no
/// room, no connection, or the system passes no more descriptors.
bool send_note(int socket, BytesView bytes, int descriptor);

/// Bytes and descriptors from a socket.
struct ReceivedNotes {
  std::size_t size = 0;
  bool ended = false;      ///< end of stream, or the connection broke
  bool truncated = false;  ///< a descriptor was lost: this process may have no more
};
/// Receives into `bytes` without waiting and appends the descriptors to `descriptors`.
ReceivedNotes receive_notes(int socket, std::span<std::byte> bytes, std::deque<Descriptor>& descriptors,
                            const LocalFaults& faults);

/// Turns bytes and descriptors into notes; pure. After a throw it must not be used again.
class NoteParser {
 public:
  /// Throws kInvalid for bytes that are not a note and for a block without its descriptor, kOverloaded if the
  /// descriptor was lost (`truncated`).
  void feed(BytesView bytes, bool truncated, std::deque<Note>& notes);
  std::deque<Descriptor>& descriptors() { return descriptors_; }

 private:
  Bytes partial_;
  std::deque<Descriptor> descriptors_;
  bool truncated_ = false;
};

}  // namespace torchspan::net
