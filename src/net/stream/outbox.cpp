#include "net/stream/outbox.h"

#include <algorithm>
#include <cstring>

namespace torchspan::net {
namespace {
constexpr std::size_t kChunkBytes = 64 << 10;
constexpr std::size_t kWorthKeeping = 4 << 10;
/// Most bytes of one message that are copied while the channel's lock is held.
constexpr std::size_t kMostCopied = 64 << 10;
}  // namespace

void Outbox::copy(BytesView bytes) {
  if (!chunks_.empty()) {
    Chunk& last = chunks_.back();
    const std::size_t taken = std::min(bytes.size(), last.room);
    if (taken != 0) {
      std::memcpy(last.data + last.size, bytes.data(), taken);
      last.size += taken;
      last.room -= taken;
      size_ += taken;
      bytes = bytes.subspan(taken);
    }
  }
  if (bytes.empty()) return;
  const Buffer buffer = allocate_buffer(std::max(bytes.size(), kChunkBytes));
  std::memcpy(buffer.data, bytes.data(), bytes.size());
  chunks_.push_back({buffer.data, bytes.size(), buffer.size - bytes.size(), buffer.owner});
  size_ += bytes.size();
}

void Outbox::add(BytesView bytes, const std::shared_ptr<const void>& keep) {
  if (keep == nullptr || bytes.size() < kWorthKeeping) return copy(bytes);
  chunks_.push_back({const_cast<std::byte*>(bytes.data()), bytes.size(), 0, keep});
  size_ += bytes.size();
}

std::uint64_t Outbox::reserve(std::size_t size, std::uint64_t last) {
  if (chunks_.empty() || last != first_ + chunks_.size() - 1) chunks_.push_back({nullptr, 0, 0, nullptr});
  chunks_.back().size += size;
  size_ += size;
  return first_ + chunks_.size() - 1;
}

void Outbox::fill(std::uint64_t place, const Buffer& bytes) {
  if (place < first_ || place - first_ >= chunks_.size()) return;
  Chunk& chunk = chunks_[place - first_];
  chunk.data = bytes.data;
  chunk.keep = bytes.owner;
}

std::size_t Outbox::front(std::span<iovec> places) const {
  std::size_t count = 0;
  for (; count < std::min(places.size(), chunks_.size()) && chunks_[count].data != nullptr; ++count) {
    places[count] = {chunks_[count].data, chunks_[count].size};
  }
  return count;
}

void Outbox::consume(std::size_t size, Released& released) {
  size_ -= size;
  while (size != 0) {
    Chunk& first = chunks_.front();
    const std::size_t taken = std::min(size, first.size);
    first.data += taken;
    first.size -= taken;
    size -= taken;
    if (first.size != 0) return;
    released.push_back(std::move(first.keep));
    chunks_.pop_front();
    ++first_;
  }
}

void Outbox::clear(Released& released) {
  for (Chunk& chunk : chunks_) released.push_back(std::move(chunk.keep));
  first_ += chunks_.size();
  chunks_.clear();
  size_ = 0;
}

void LateCopies::add(Outbox& outbox, std::size_t index, BytesView bytes) {
  if (bytes.empty()) return;
  const bool same = !copies_.empty() && copies_.back().outbox == index;
  const std::uint64_t last = same ? copies_.back().place : 0;
  const std::uint64_t place = outbox.reserve(bytes.size(), last);
  if (place != last) copies_.push_back({index, place, {}, 0, {}});
  copies_.back().parts.push_back(bytes);
  copies_.back().size += bytes.size();
}

void LateCopies::make() {
  for (Copy& copy : copies_) {
    copy.bytes = allocate_buffer(copy.size);
    std::byte* to = copy.bytes.data;
    for (const BytesView part : copy.parts) {
      std::memcpy(to, part.data(), part.size());
      to += part.size();
    }
  }
}

void LateCopies::fill(Outbox& outbox, std::size_t index) const {
  for (const Copy& copy : copies_) {
    if (copy.outbox == index) outbox.fill(copy.place, copy.bytes);
  }
}

BytesView Outgoing::piece(std::size_t index) const {
  if (index == 0) return prefix_;
  if (index == 1) return header_;
  return {segments_[index - 2].data, segments_[index - 2].size};
}

std::size_t Outgoing::front(std::span<iovec> places) const {
  std::size_t used = 0;
  std::size_t offset = offset_;
  for (std::size_t i = piece_; i < count() && used < places.size(); ++i, offset = 0) {
    const BytesView bytes = piece(i).subspan(offset);
    if (!bytes.empty()) places[used++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  }
  return used;
}

void Outgoing::consume(std::size_t size) {
  offset_ += size;
  while (piece_ < count() && offset_ >= piece(piece_).size()) offset_ -= piece(piece_++).size();
}

bool Outgoing::is_kept(std::size_t index) const {
  return index >= 2 && segments_[index - 2].keep && segments_[index - 2].size >= kWorthKeeping;
}

void Outgoing::queue_rest(Outbox& outbox, LateCopies& late, std::size_t index) const {
  std::size_t copied = 0;
  std::size_t offset = offset_;
  for (std::size_t i = piece_; i < count(); ++i, offset = 0) {
    if (!is_kept(i)) copied += piece(i).size() - offset;
  }
  offset = offset_;
  for (std::size_t i = piece_; i < count(); ++i, offset = 0) {
    const BytesView rest = piece(i).subspan(offset);
    if (is_kept(i)) {
      outbox.add(rest, segments_[i - 2].keep);
    } else if (copied <= kMostCopied || (i == 0 && rest.size() < kWorthKeeping)) {
      outbox.copy(rest);
    } else {
      late.add(outbox, index, rest);
    }
  }
}

}  // namespace torchspan::net
