#include "net/tls/pieces.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include "core/api/throw_invalid.h"

namespace torchspan::net {
namespace {

struct PiecePrefix {
  std::uint64_t message;
  std::uint32_t index;
  std::uint32_t zero;
};
static_assert(sizeof(PiecePrefix) == kPiecePrefixBytes && std::endian::native == std::endian::little);

constexpr std::uint64_t kMostPieces = std::uint64_t{1} << 32;

}  // namespace

std::array<std::byte, kPiecePrefixBytes> piece_prefix(std::uint64_t message, std::uint32_t index) {
  const PiecePrefix prefix{message, index, 0};
  std::array<std::byte, kPiecePrefixBytes> bytes;
  std::memcpy(bytes.data(), &prefix, bytes.size());
  return bytes;
}

std::uint64_t piece_count(std::uint64_t bytes) { return (bytes + kPieceBytes - 1) / kPieceBytes; }

void Assembly::expect(Message message, std::vector<std::uint64_t> sizes) {
  auto waiting = std::make_unique<Waiting>();
  waiting->message = std::move(message);
  waiting->ends = std::move(sizes);
  for (std::uint64_t& end : waiting->ends) end = waiting->size += end;
  waiting->left = waiting->size;
  if (waiting->size == 0 || piece_count(waiting->size) > kMostPieces) {
    throw_invalid("a striped message of {} bytes was announced", waiting->size);
  }
  open_[announced_++] = waiting.get();
  waiting_.push_back(std::move(waiting));
}

void Assembly::add(Message message) {
  held_bytes_ += message.header.size();
  for (const Buffer& buffer : message.segments) held_bytes_ += buffer.size;
  auto waiting = std::make_unique<Waiting>();
  waiting->message = std::move(message);
  waiting_.push_back(std::move(waiting));
}

void Assembly::take(std::vector<Message>& finished) {
  while (!waiting_.empty() && waiting_.front()->left == 0) {
    Waiting& first = *waiting_.front();
    if (first.ends.empty()) {
      held_bytes_ -= first.message.header.size();
      for (const Buffer& buffer : first.message.segments) held_bytes_ -= buffer.size;
    }
    finished.push_back(std::move(first.message));
    waiting_.pop_front();
  }
}

void Assembly::allocate(Waiting& waiting) {
  waiting.claimed.resize(piece_count(waiting.size));
  std::uint64_t begin = 0;
  for (const std::uint64_t end : waiting.ends) {
    const std::uint64_t size = end - begin;
    Buffer buffer = allocator_(size);
    if (buffer.size < size || (size != 0 && buffer.data == nullptr)) {
      throw Error(ErrorKind::kOverloaded, fmt::format("no memory for a received segment of {} bytes", size));
    }
    buffer.size = size;
    waiting.message.segments.push_back(std::move(buffer));
    begin = end;
  }
}

Assembly::Piece Assembly::claim(std::uint64_t message, std::uint32_t index) {
  const auto found = open_.find(message);
  if (found == open_.end() || index >= piece_count(found->second->size) ||
      (!found->second->claimed.empty() && found->second->claimed[index])) {
    throw_invalid("piece {} of striped message {} arrived twice or does not exist", index, message);
  }
  Waiting& waiting = *found->second;
  if (waiting.claimed.empty()) allocate(waiting);
  waiting.claimed[index] = true;
  const std::uint64_t offset = index * kPieceBytes;
  return {message, offset, std::min(kPieceBytes, waiting.size - offset)};
}

std::size_t Assembly::places(const Piece& piece, std::uint64_t done, std::span<iovec> places) {
  const Waiting& waiting = *open_.at(piece.message);
  std::uint64_t at = piece.offset + done;
  const std::uint64_t end = piece.offset + piece.size;
  std::size_t segment = std::ranges::upper_bound(waiting.ends, at) - waiting.ends.begin();
  std::size_t count = 0;
  for (; at < end && count < places.size(); ++segment) {
    const std::uint64_t begin = segment == 0 ? 0 : waiting.ends[segment - 1];
    const std::uint64_t size = std::min(end, waiting.ends[segment]) - at;
    if (size == 0) continue;
    places[count++] = {waiting.message.segments[segment].data + (at - begin), size};
    at += size;
  }
  return count;
}

void Assembly::done(const Piece& piece) {
  Waiting& waiting = *open_.at(piece.message);
  waiting.left -= piece.size;
  if (waiting.left == 0) open_.erase(piece.message);
}

std::uint64_t PieceReader::message() const {
  std::uint64_t number;
  std::memcpy(&number, prefix_.data(), sizeof number);
  return number;
}

void PieceReader::begin() {
  PiecePrefix prefix;
  std::memcpy(&prefix, prefix_.data(), sizeof prefix);
  if (prefix.zero != 0) throw_invalid("received bytes that are not a piece of a message");
  piece_ = assembly_.claim(prefix.message, prefix.index);
  in_piece_ = true;
  prefix_filled_ = 0;
  done_ = 0;
}

std::size_t PieceReader::targets(std::span<iovec> places) {
  if (!in_piece_ && prefix_filled_ == kPiecePrefixBytes) begin();
  const std::size_t count =
      in_piece_ ? assembly_.places(piece_, done_, places.first(places.size() - 1)) : std::size_t{0};
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) bytes += places[i].iov_len;
  if (in_piece_ && bytes < piece_.size - done_) return count;
  places[count] = {prefix_.data() + prefix_filled_, kPiecePrefixBytes - prefix_filled_};
  return count + 1;
}

void PieceReader::received(std::size_t size) {
  if (in_piece_) {
    const std::size_t taken = std::min<std::uint64_t>(size, piece_.size - done_);
    done_ += taken;
    size -= taken;
    if (done_ == piece_.size) {
      in_piece_ = false;
      assembly_.done(piece_);
    }
  }
  prefix_filled_ += size;
}

}  // namespace torchspan::net
