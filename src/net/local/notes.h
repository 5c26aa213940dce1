#pragma once
#include <cstdint>
#include <deque>
#include <span>

#include <torchspan/core/bytes.h>

#include "core/api/descriptor.h"
#include "net/local/local_faults.h"

namespace torchspan::net {

/// What two local transports say on their socket while frames take the ring. Fixed sizes, little-endian:
///
///   wake     u8 1                                   look at your ring
///   block    u8 2  u8 0[7]  u64 number  u64 bytes   with the descriptor of its memory
///   retired  u8 3  u8 0[7]  u64 number  u64 0       forget that block
struct Note {
  enum class Kind : std::uint8_t { kWake = 1, kBlock = 2, kRetired = 3 };
  Kind kind;
  std::uint64_t number = 0;
  std::uint64_t size = 0;
  Descriptor descriptor = {};
};
inline constexpr std::size_t kNoteBytes = 24;

/// Sends bytes that fit as one, with a descriptor if `descriptor` is not -1. False when they were not sent:
/// no room, no connection, or the system passes no more descriptors.
bool send_note(int socket, BytesView bytes, int descriptor);

/// Bytes and descriptors from a socket.
struct Reception {
  std::size_t size = 0;
  bool ended = false;      ///< end of stream, or the connection broke
  bool truncated = false;  ///< a descriptor was lost: this process may have no more
};
/// Receives into `bytes` without waiting and appends the descriptors to `descriptors`.
Reception receive_notes(int socket, std::span<std::byte> bytes, std::deque<Descriptor>& descriptors,
                        const LocalFaults& faults);

/// Bytes and descriptors in, notes out; pure. After a throw it must be dropped.
class NoteParser {
 public:
  /// Throws kInvalid for what is no note and for a block without its descriptor; kOverloaded when that was
  /// lost on the way (`truncated`).
  void feed(BytesView bytes, bool truncated, std::deque<Note>& notes);
  std::deque<Descriptor>& descriptors() { return descriptors_; }

 private:
  Bytes partial_;
  std::deque<Descriptor> descriptors_;
  bool truncated_ = false;
};

}  // namespace torchspan::net
