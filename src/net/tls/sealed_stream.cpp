#include "net/tls/sealed_stream.h"

#include <cerrno>
#include <cstring>

namespace torchspan::net {

SealedStream::SealedStream(int socket, RecordReader reader, RecordWriter writer)
    : socket_(socket),
      reader_(std::move(reader)),
      writer_(std::move(writer)),
      unsent_(writer_.waiting().size()) {}

ByteStream::Got SealedStream::read(std::span<const iovec> places) {
  MutexLock lock(reading_);
  Got got;
  PlaceCursor cursor(places);
  // A read that returns less than it could emptied the socket.
  bool drained = false;
  for (;;) {
    got.size += reader_.read(cursor);
    if (cursor.at_end() || got.size >= RecordWriter::kBatch) break;
    if (drained) return got;
    const std::span<char> room = reader_.room();
    const iovec place{room.data(), room.size()};
    const Got received = receive_now(socket_, std::span(&place, 1));
    reader_.received(received.size);
    got.heard |= received.heard;
    got.ended = received.ended;
    got.broken = received.broken;
    drained = received.size < room.size();
    if (received.size == 0) return got;
  }
  got.heard |= got.size != 0;
  got.more = true;
  return got;
}

ssize_t SealedStream::write(std::span<const iovec> places) {
  MutexLock lock(writing_);
  if (!broken_.empty()) return -1;
  std::size_t taken = writer_.write(places);
  if (taken == 0) {
    if (!flush_locked()) return -1;
    taken = writer_.write(places);
  }
  return flush_locked() ? static_cast<ssize_t>(taken) : -1;
}

bool SealedStream::flush() {
  MutexLock lock(writing_);
  return broken_.empty() && flush_locked();
}

bool SealedStream::flush_locked() {
  while (!writer_.waiting().empty()) {
    const std::span<const char> waiting = writer_.waiting();
    const iovec place{const_cast<char*>(waiting.data()), waiting.size()};
    const ssize_t sent = send_now(socket_, std::span(&place, 1));
    if (sent < 0) broken_ = std::strerror(errno);
    if (sent <= 0) break;
    writer_.sent(static_cast<std::size_t>(sent));
  }
  unsent_.store(broken_.empty() ? writer_.waiting().size() : 0, std::memory_order_relaxed);
  return broken_.empty();
}

std::string SealedStream::broken() const {
  MutexLock lock(writing_);
  return broken_;
}

std::uint64_t SealedStream::key_renewals() const {
  MutexLock lock(writing_);
  return writer_.key_renewals();
}

}  // namespace torchspan::net
