#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <sys/types.h>
#include <sys/uio.h>

namespace torchspan::net {

/// The bytes of one connection over a non-blocking socket, after both sides proved themselves. One thread
/// reads; any thread writes.
class ByteStream {
 public:
  struct Got {
    std::size_t size = 0;  ///< bytes in the places, in order
    bool heard = false;    ///< any byte arrived, perhaps only part of a record
    bool more = false;     ///< the places are full; there may be more
    bool ended = false;    ///< the stream has ended
    int broken = 0;        ///< or the socket failed, with this error number
  };
  virtual ~ByteStream() = default;

  /// Receives what is there, up to the size of `places` or some hundred KiB. Throws kInvalid for bytes that
  /// the peer did not send.
  virtual Got read(std::span<const iovec> places) = 0;
  /// Returns how many bytes were accepted, 0 if the socket is full, -1 if it is broken (broken() is the
  /// reason).
  virtual ssize_t write(std::span<const iovec> places) = 0;
  /// Sends accepted bytes that were not sent; returns false if the socket is broken.
  virtual bool flush() = 0;
  /// Accepted bytes that wait for room in the socket.
  virtual std::size_t unsent() const = 0;
  virtual std::string broken() const = 0;
  /// How often this side changed its encryption key.
  virtual std::uint64_t key_renewals() const = 0;
};

/// Receives without waiting into `places` and fills in all of `got` but `more`.
ByteStream::Got receive_now(int socket, std::span<const iovec> places);

/// A position in a sequence of places in memory, which it borrows.
class PlaceCursor {
 public:
  explicit PlaceCursor(std::span<const iovec> places) : places_(places) { skip_empty(); }

  bool at_end() const { return places_.empty(); }
  /// Moves past the next contiguous bytes, at most `most` of them, and returns them.
  std::span<char> next(std::size_t most) {
    const std::size_t size = std::min(places_.front().iov_len - offset_, most);
    const std::span<char> bytes(static_cast<char*>(places_.front().iov_base) + offset_, size);
    offset_ += size;
    skip_empty();
    return bytes;
  }

 private:
  void skip_empty() {
    while (!places_.empty() && offset_ == places_.front().iov_len) {
      places_ = places_.subspan(1);
      offset_ = 0;
    }
  }

  std::span<const iovec> places_;
  std::size_t offset_ = 0;
};

inline std::size_t bytes_in(std::span<const iovec> places) {
  std::size_t bytes = 0;
  for (const iovec& place : places) bytes += place.iov_len;
  return bytes;
}

}  // namespace torchspan::net
