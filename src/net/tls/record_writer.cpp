#include "net/tls/record_writer.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace torchspan::net {

RecordWriter::RecordWriter(RecordCipher cipher, std::uint64_t bytes_per_key, std::span<const char> unsent)
    : cipher_(std::move(cipher)), bytes_per_key_(bytes_per_key) {
  make_room(unsent.size());
  std::ranges::copy(unsent, out_.get());
  end_ = unsent.size();
}

std::size_t RecordWriter::write(std::span<const iovec> places) {
  if (end_ - begin_ >= kBatch) return 0;
  std::size_t left = bytes_in(places);
  if (left > kBatch + (kMostRecordBytes - kRecordBytes)) left = kBatch;
  const std::size_t taken = left;
  make_room(left + (left / kRecordBytes + 1) * kRecordOverhead);
  PlaceCursor cursor(places);
  while (left != 0) {
    const std::size_t size = left <= kMostRecordBytes ? left : kRecordBytes;
    seal(cursor, size);
    left -= size;
  }
  return taken;
}

void RecordWriter::seal(PlaceCursor& places, std::size_t size) {
  under_this_key_ += size;
  const bool last = under_this_key_ >= bytes_per_key_;
  const std::uint32_t number = static_cast<std::uint32_t>(size) | (last ? kLastUnderKey : 0);
  std::array<char, kRecordHeaderBytes> header;
  std::memcpy(header.data(), &number, header.size());
  cipher_.begin(header);
  char* to = std::ranges::copy(header, out_.get() + end_).out;
  while (size != 0) {
    const std::span<char> part = places.next(size);
    cipher_.add(part.data(), to, part.size());
    to += part.size();
    size -= part.size();
  }
  cipher_.finish(to);
  end_ = static_cast<std::size_t>(to - out_.get()) + kRecordTagBytes;
  if (!last) return;
  cipher_.renew_key();
  under_this_key_ = 0;
  ++key_renewals_;
}

void RecordWriter::make_room(std::size_t size) {
  if (begin_ == end_) begin_ = end_ = 0;
  if (room_ - end_ >= size) return;
  const std::size_t held = end_ - begin_;
  if (room_ - held >= size) {
    std::memmove(out_.get(), out_.get() + begin_, held);
  } else {
    room_ = std::max(held + size, std::min(2 * room_, kRecordBytes));
    auto roomier = std::make_unique_for_overwrite<char[]>(room_);
    if (held != 0) std::memcpy(roomier.get(), out_.get() + begin_, held);
    out_ = std::move(roomier);
  }
  begin_ = 0;
  end_ = held;
}

void RecordWriter::sent(std::size_t size) { begin_ += size; }

}  // namespace torchspan::net
