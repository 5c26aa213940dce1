#include "net/tls/record_cipher.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fmt/format.h>
#include <openssl/crypto.h>
#include <string_view>
#include <vector>

#include <torchspan/core/error.h>

namespace torchspan::net {
namespace {

constexpr std::string_view kRecordKeyLabel = "torchspan record key, version 1";

}  // namespace

RecordCipher::RecordCipher(const EVP_CIPHER* algorithm, const KeySecret& secret, CipherUse use)
    : aead_(make_aead(algorithm, use)), secret_(secret) {
  renew_key();
}

RecordCipher::~RecordCipher() { OPENSSL_cleanse(secret_.data(), secret_.size()); }

void RecordCipher::renew_key() {
  const std::size_t key_size = aead_->key_bytes();
  std::vector<unsigned char> derived(secret_.size() + key_size + base_.size());
  derive_key(std::as_bytes(std::span(secret_)), kRecordKeyLabel, derived);
  const auto* key = derived.data() + secret_.size();
  std::copy_n(derived.data(), secret_.size(), secret_.begin());
  std::copy_n(key + key_size, base_.size(), base_.begin());
  number_ = 0;
  aead_->set_key({key, key_size});
  OPENSSL_cleanse(derived.data(), derived.size());
}

void RecordCipher::begin(const std::array<char, kRecordHeaderBytes>& header) {
  auto nonce = base_;
  for (std::size_t i = 0; i < sizeof number_; ++i) {
    nonce[nonce.size() - 1 - i] ^= static_cast<unsigned char>(number_ >> (8 * i));
  }
  ++number_;
  aead_->begin(nonce, header);
}

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
