#include "net/tls/plain_stream.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "net/tls/place_cursor.h"

namespace torchspan::net {

PlainStream::PlainStream(int socket, std::vector<char> ahead, std::vector<char> unsent)
    : socket_(socket), ahead_(std::move(ahead)), unsent_(std::move(unsent)), waiting_(unsent_.size()) {}

ByteStream::Got PlainStream::read(std::span<const iovec> places) {
  if (ahead_.empty()) {
    Got got = receive_now(socket_, places);
    got.more = got.size == bytes_in(places);
    return got;
  }
  Got got{.heard = true, .more = true};
  for (PlaceCursor cursor(places); !cursor.at_end() && got.size < ahead_.size();) {
    const std::span<char> part = cursor.next(ahead_.size() - got.size);
    std::memcpy(part.data(), ahead_.data() + got.size, part.size());
    got.size += part.size();
  }
  ahead_.erase(ahead_.begin(), ahead_.begin() + static_cast<std::ptrdiff_t>(got.size));
  return got;
}

ssize_t PlainStream::write(std::span<const iovec> places) {
  MutexLock lock(mutex_);
  if (!broken_.empty() || !flush_locked()) return -1;
  return unsent_.empty() ? send(places) : 0;
}

bool PlainStream::flush() {
  MutexLock lock(mutex_);
  return broken_.empty() && flush_locked();
}

ssize_t PlainStream::send(std::span<const iovec> places) {
  const ssize_t sent = send_now(socket_, places);
  if (sent < 0) {
    broken_ = std::strerror(errno);
    unsent_.clear();
    waiting_.store(0, std::memory_order_relaxed);
  }
  return sent;
}

bool PlainStream::flush_locked() {
  if (unsent_.empty()) return true;
  const iovec place{unsent_.data(), unsent_.size()};
  const ssize_t sent = send(std::span(&place, 1));
  if (sent < 0) return false;
  unsent_.erase(unsent_.begin(), unsent_.begin() + sent);
  waiting_.store(unsent_.size(), std::memory_order_relaxed);
  return true;
}

std::string PlainStream::broken() const {
  MutexLock lock(mutex_);
  return broken_;
}

}  // namespace torchspan::net
