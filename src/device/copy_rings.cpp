#include "device/api/copy_rings.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "device/api/tensors.h"

namespace torchspan::device {

UploadRing::UploadRing(c10::Device device, std::size_t chunk)
    : device_(device), chunk_(chunk), halves_{make_half(), make_half()} {}

UploadRing::Half UploadRing::make_half() const {
  const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(device_.is_cuda());
  return {stream_from_pool(device_, /*high_priority=*/true),
          at::empty({static_cast<std::int64_t>(chunk_)}, options)};
}

at::Tensor UploadRing::upload(const at::Tensor& tensor, const c10::Stream& stream) {
  at::Tensor copy;
  {
    StreamsScope scope;
    scope.enter(stream);
    copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_));
  }
  const auto* source = static_cast<const std::byte*>(tensor.data_ptr());
  // The memory may have been freed on `stream`, whose earlier work may still use it.
  for (const Half& half : halves_) order_after(half.stream, stream);
  std::size_t round = 0;
  for (std::size_t from = 0; from < tensor.nbytes(); from += chunk_, ++round) {
    const Half& half = halves_[round % halves_.size()];
    if (round >= halves_.size()) half.stream.synchronize();  // the device has read the buffer
    const std::size_t count = std::min(chunk_, tensor.nbytes() - from);
    std::memcpy(half.buffer.data_ptr(), source + from, count);
    StreamsScope scope;
    scope.enter(half.stream);
    bytes_of_dense(copy, from, count)
        .copy_(half.buffer.narrow(0, 0, static_cast<std::int64_t>(count)), /*non_blocking=*/true);
  }
  for (const Half& half : halves_) half.stream.synchronize();
  return copy;
}

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
