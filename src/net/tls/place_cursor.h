#pragma once
#include <algorithm>
#include <cstddef>
#include <span>
#include <sys/uio.h>

namespace torchspan::net {

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
