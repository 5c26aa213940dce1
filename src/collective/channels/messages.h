#pragma once
#include <cstdint>
#include <string>
#include <variant>

#include <torchspan/core/bytes.h>

/// Headers of the messages that ranks of a group exchange over their own connections. The first byte is the
/// type, numbers are little-endian, a text is a u32 length and its bytes:
///   hello = 1, u64 nonce, u32 rank       and a segment of kProbeBytes
///   part  = 2, u64 operation, u32 part, u64 calls       and the data as a segment
///   abort = 3, u8 kind, u64 from_call, text
///   end   = 4, text
/// and of those that two ranks exchange for send() and recv(), where `number` counts the sender's messages to this rank:
///   offer  = 5, u64 number, u32 tag, text       and, if the tensor is small, its data as a segment
///   accept = 6, u64 number
///   data   = 7, u64 number       and the next piece as a segment
///   done   = 8, u64 number
namespace torchspan::collective::channels {

/// Size of a hello's segment: larger than any packet, so that a path that drops large packets fails at once.
inline constexpr std::size_t kProbeBytes = std::size_t{64} << 10;

/// First message of both sides of a connection.
struct Hello {
  std::uint64_t nonce = 0;  ///< of the rank that listens
  std::uint32_t rank = 0;   ///< of the sender
};
/// A piece of an operation's data.
struct Part {
  std::uint64_t operation = 0;
  std::uint32_t part = 0;
  std::uint64_t calls = 0;  ///< calls of the group that the sender has begun
};
/// The group is broken on all ranks.
struct Abort {
  ErrorKind kind = ErrorKind::kInvalid;
  std::uint64_t from_call = 0;  ///< earlier calls of the group may still complete
  std::string text;
};
/// The sender sends no more over this connection.
struct End {
  std::string text;
};
/// A tensor that the sender offers.
struct Offer {
  std::uint64_t number = 0;
  std::uint32_t tag = 0;
  std::string text = {};  ///< dtype and shape: "Float [3, 4]"
};
/// The receiver waits for the data of an offer.
struct Accept {
  std::uint64_t number = 0;
};
/// The next piece of an offer's data.
struct Data {
  std::uint64_t number = 0;
};
/// The receiver has all of an offer.
struct Done {
  std::uint64_t number = 0;
};
using GroupMessage = std::variant<Hello, Part, Abort, End, Offer, Accept, Data, Done>;

Bytes encode(const GroupMessage& note);
/// Throws kInvalid for any other bytes.
GroupMessage decode(BytesView header);

}  // namespace torchspan::collective::channels
