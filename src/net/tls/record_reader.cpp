#include "net/tls/record_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fmt/format.h>

#include <torchspan/core/error.h>

namespace torchspan::net {
namespace {

constexpr std::size_t kFirstRoom = 16 << 10;
constexpr std::size_t kMostRoom = 384 << 10;
static_assert(kMostRoom >= kMostRecordBytes + kRecordOverhead);

}  // namespace

RecordReader::RecordReader(RecordCipher cipher, std::string peer, std::span<const char> ahead)
    : cipher_(std::move(cipher)),
      peer_(std::move(peer)),
      room_(std::max(kFirstRoom, ahead.size())),
      end_(ahead.size()) {
  in_ = std::make_unique_for_overwrite<char[]>(room_);
  std::ranges::copy(ahead, in_.get());
}

std::span<char> RecordReader::room() {
  const std::size_t held = end_ - begin_;
  if ((filled_ || held == room_) && room_ < kMostRoom) {
    room_ = std::min(2 * room_, kMostRoom);
    auto roomier = std::make_unique_for_overwrite<char[]>(room_);
    std::memcpy(roomier.get(), in_.get() + begin_, held);
    in_ = std::move(roomier);
  } else if (begin_ != 0) {
    std::memmove(in_.get(), in_.get() + begin_, held);
  }
  begin_ = 0;
  end_ = held;
  return {in_.get() + end_, room_ - end_};
}

void RecordReader::received(std::size_t size) {
  end_ += size;
  filled_ = end_ == room_;
}

std::optional<std::uint32_t> RecordReader::next_record() const {
  if (end_ - begin_ < kRecordHeaderBytes) return std::nullopt;
  std::uint32_t header;
  std::memcpy(&header, in_.get() + begin_, sizeof header);
  const std::uint32_t size = header & ~kLastUnderKey;
  if (size == 0 || size > kMostRecordBytes) throw_invalid();
  if (end_ - begin_ < size + kRecordOverhead) return std::nullopt;
  return header;
}

std::size_t RecordReader::read(PlaceCursor& places) {
  std::size_t taken = take_rest(places);
  while (!places.at_end()) {
    const auto header = next_record();
    if (!header) break;
    taken += open(*header, places);
  }
  return taken;
}

std::size_t RecordReader::take_rest(PlaceCursor& places) {
  std::size_t taken = 0;
  while (rest_begin_ != rest_end_ && !places.at_end()) {
    const std::span<char> part = places.next(rest_end_ - rest_begin_);
    std::memcpy(part.data(), rest_.get() + rest_begin_, part.size());
    rest_begin_ += part.size();
    taken += part.size();
  }
  return taken;
}

std::size_t RecordReader::open(std::uint32_t header, PlaceCursor& places) {
  std::array<char, kRecordHeaderBytes> bytes;
  std::memcpy(bytes.data(), in_.get() + begin_, bytes.size());
  cipher_.begin(bytes);
  const char* from = in_.get() + begin_ + kRecordHeaderBytes;
  std::size_t left = header & ~kLastUnderKey;
  std::size_t taken = 0;
  while (left != 0 && !places.at_end()) {
    const std::span<char> part = places.next(left);
    cipher_.add(from, part.data(), part.size());
    from += part.size();
    left -= part.size();
    taken += part.size();
  }
  if (left != 0) {
    if (!rest_) rest_ = std::make_unique_for_overwrite<char[]>(kMostRecordBytes);
    cipher_.add(from, rest_.get(), left);
    from += left;
  }
  if (!cipher_.verify(from)) throw_invalid();
  rest_begin_ = 0;
  rest_end_ = left;
  begin_ += (header & ~kLastUnderKey) + kRecordOverhead;
  if ((header & kLastUnderKey) != 0) cipher_.renew_key();
  return taken;
}

void RecordReader::throw_invalid() const {
  throw Error(
      ErrorKind::kInvalid,
      fmt::format("'{}' is cut off: bytes arrived that it did not encrypt for this connection", peer_));
}

}  // namespace torchspan::net
