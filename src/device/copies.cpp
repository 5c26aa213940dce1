#include <algorithm>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <torchspan/detail/device/copies.h>

namespace torchspan::device {
namespace {

/// Strides as at::empty_like() has them: of the tensor if it has no gaps and overlaps, else row-major.
at::DimVector dense_strides_like(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return at::DimVector(tensor.strides());
  at::DimVector strides(tensor.sizes().size());
  std::int64_t next = 1;
  for (std::size_t i = strides.size(); i-- > 0;) {
    strides[i] = next;
    next *= std::max<std::int64_t>(tensor.sizes()[i], 1);
  }
  return strides;
}

}  // namespace

PendingCopies::~PendingCopies() {
  for (const Mark& mark : marks_) {
    if (!mark.reached()) mark.stream().synchronize();
  }
}

PendingCopies& PendingCopies::operator=(PendingCopies&& other) noexcept {
  marks_.swap(other.marks_);
  host_.swap(other.host_);
  return *this;
}

bool PendingCopies::complete() {
  if (!std::all_of(marks_.begin(), marks_.end(), [](const Mark& mark) { return mark.reached(); }))
    return false;
  marks_.clear();
  host_.clear();
  return true;
}

c10::Stream CopyStreams::stream(c10::Device device, int direction) {
  MutexLock lock(mutex_);
  const std::pair key{std::pair{static_cast<int>(device.type()), static_cast<int>(device.index())},
                      direction};
  const auto found = streams_.find(key);
  if (found != streams_.end()) return found->second;
  return streams_.emplace(key, stream_from_pool(device, /*high_priority=*/true)).first->second;
}

/// A large tensor is first copied on the device, which is fast, so that the current stream may go on while the
/// copy travels to the host.
at::Tensor CopyStreams::to_host(const at::Tensor& tensor, PendingCopies& copies) {
  const at::NoGradGuard no_grad;
  const c10::Stream here = current_stream(tensor.device());
  at::Tensor host =
      at::empty_strided(tensor.sizes(), dense_strides_like(tensor),
                        at::TensorOptions().dtype(tensor.dtype()).pinned_memory(tensor.device().is_cuda()));
  c10::Stream used = here;
  if (tensor.nbytes() <= kDirect) {
    host.copy_(tensor, /*non_blocking=*/true);
  } else {
    const at::Tensor captured = tensor.clone();
    used = out(tensor.device());
    order_after(used, here, *events_);
    StreamsScope scope;
    scope.enter(used);
    host.copy_(captured, /*non_blocking=*/true);
    keep_memory_for(captured, used);
  }
  copies.host_.push_back(host);
  // Of several copies on one stream, the last mark counts.
  std::vector<Mark> others;
  for (Mark& mark : copies.marks_) {
    if (mark.stream() != used) others.push_back(std::move(mark));
  }
  copies.marks_.swap(others);
  copies.marks_.emplace_back(used, events_);
  return host;
}

at::Tensor CopyStreams::to_device(const at::Tensor& tensor, c10::Device device) {
  const at::NoGradGuard no_grad;
  at::Tensor copy;
  {
    StreamsScope scope;
    scope.enter(in(device));
    copy = tensor.to(device);
  }
  keep_memory_for(copy, current_stream(device));
  return copy;
}

void CopyStreams::order_defaults_after(const Streams& streams) const {
  for (const c10::Stream& stream : streams) order_after(default_stream(stream.device()), stream, *events_);
}

void CopyStreams::order_after_defaults(const Streams& streams) const {
  for (const c10::Stream& stream : streams) order_after(stream, default_stream(stream.device()), *events_);
}

}  // namespace torchspan::device
