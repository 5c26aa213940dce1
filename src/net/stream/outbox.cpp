#include "net/stream/outbox.h"

#include <algorithm>
#include <cstring>

namespace torchspan::net {
namespace {
constexpr std::size_t kChunkBytes = 64 << 10;
constexpr std::size_t kWorthKeeping = 4 << 10;
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

std::size_t Outbox::front(std::span<iovec> places) const {
  const std::size_t count = std::min(places.size(), chunks_.size());
  for (std::size_t i = 0; i < count; ++i) places[i] = {chunks_[i].data, chunks_[i].size};
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
  }
}

void Outbox::clear(Released& released) {
  for (Chunk& chunk : chunks_) released.push_back(std::move(chunk.keep));
  chunks_.clear();
  size_ = 0;
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

void Outgoing::queue_rest(Outbox& outbox) const {
  std::size_t offset = offset_;
  for (std::size_t i = piece_; i < count(); ++i, offset = 0) {
    const BytesView rest = piece(i).subspan(offset);
    i < 2 ? outbox.copy(rest) : outbox.add(rest, segments_[i - 2].keep);
  }
}

}  // namespace torchspan::net
