#include "device/upload_ring.h"

#include <algorithm>
#include <cstring>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "device/api/dense_bytes.h"

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

}  // namespace torchspan::device
