#include "device/api/download_ring.h"

#include <atomic>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "device/api/dense_bytes.h"

namespace torchspan::device {

/// A buffer, and the copy that fills it.
struct DownloadRing::Half {
  Half() = default;
  /// The copy may still write the buffer.
  ~Half() {
    if (written) written->wait();
  }
  Half(const Half&) = delete;
  Half& operator=(const Half&) = delete;

  at::Tensor buffer;
  std::size_t size = 0;  ///< of the part in it
  std::optional<Mark> written;
  std::atomic<bool> free{true};
};

DownloadRing::DownloadRing(c10::Device device, std::size_t part)
    : device_(device),
      part_(part),
      stream_(stream_from_pool(device, /*high_priority=*/true)),
      halves_{std::make_shared<Half>(), std::make_shared<Half>()} {}

bool DownloadRing::has_room() const { return half(filled_).free.load(std::memory_order_acquire); }

/// A discarded copy may still write the buffer; the new one follows it on the same stream.
bool DownloadRing::fill(const at::Tensor& tensor, std::size_t from, std::size_t count) {
  if (!has_room()) return false;
  Half& next = half(filled_);
  const at::NoGradGuard no_grad;
  if (!next.buffer.defined()) {
    const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(device_.is_cuda());
    next.buffer = at::empty({static_cast<std::int64_t>(part_)}, options);
  }
  StreamsScope scope;
  scope.enter(stream_);
  const auto length = static_cast<std::int64_t>(count);
  next.buffer.narrow(0, 0, length).copy_(bytes_of_dense(tensor, from, count), /*non_blocking=*/true);
  next.written.emplace(stream_, events_);
  next.size = count;
  next.free.store(false, std::memory_order_relaxed);
  ++filled_;
  return true;
}

bool DownloadRing::ready() const { return taken_ < filled_ && half(taken_).written->reached(); }

std::optional<Segment> DownloadRing::take() {
  if (!ready()) return std::nullopt;
  const std::shared_ptr<Half>& oldest = halves_[taken_++ % halves_.size()];
  oldest->written.reset();
  const auto* data = static_cast<const std::byte*>(oldest->buffer.data_ptr());
  std::shared_ptr<const void> keep(static_cast<const void*>(data), [owner = oldest](const void*) {
    owner->free.store(true, std::memory_order_release);
  });
  return Segment{data, oldest->size, std::move(keep)};
}

void DownloadRing::discard() {
  for (; taken_ < filled_; ++taken_) half(taken_).free.store(true, std::memory_order_relaxed);
}

}  // namespace torchspan::device
