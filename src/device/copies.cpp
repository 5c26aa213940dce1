#include <algorithm>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <torchspan/detail/device/copies.h>

#include "device/api/copy_rings.h"
#include "device/api/tensors.h"

namespace torchspan::device {
namespace {

std::pair<int, int> place_of(c10::Device device) {
  return {static_cast<int>(device.type()), static_cast<int>(device.index())};
}

}  // namespace

PendingCopies::~PendingCopies() {
  for (const Mark& mark : marks_) mark.wait();
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

void PendingCopies::wait() {
  for (const Mark& mark : marks_) mark.synchronize();
  marks_.clear();
  host_.clear();
}

/// Of several copies on one stream, the last mark counts.
void PendingCopies::mark(const c10::Stream& stream, const EventPoolPtr& events) {
  std::vector<Mark> others;
  for (Mark& mark : marks_) {
    if (mark.stream() != stream) others.push_back(std::move(mark));
  }
  marks_.swap(others);
  marks_.emplace_back(stream, events);
}

c10::Stream CopyStreams::stream(c10::Device device, int direction) {
  MutexLock lock(mutex_);
  const std::pair key{place_of(device), direction};
  const auto found = streams_.find(key);
  if (found != streams_.end()) return found->second;
  return streams_.emplace(key, stream_from_pool(device, /*high_priority=*/true)).first->second;
}

/// A large tensor is first copied on the device, which is fast, so that the current stream may continue while the
/// copy is sent to the host.
at::Tensor CopyStreams::to_host(const at::Tensor& given, PendingCopies& copies) {
  const at::NoGradGuard no_grad;
  const at::Tensor tensor = given.resolve_conj().resolve_neg();
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
  copies.mark(used, events_);
  return host;
}

at::Tensor CopyStreams::to_device(const at::Tensor& given, c10::Device device) {
  const at::NoGradGuard no_grad;
  const at::Tensor tensor = given.resolve_conj().resolve_neg();
  at::Tensor copy;
  if (device.is_cuda() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
      tensor.nbytes() >= kLarge && tensor.is_non_overlapping_and_dense()) {
    copy = upload(tensor, device);
  } else {
    StreamsScope scope;
    scope.enter(in(device));
    copy = tensor.to(device);
  }
  keep_memory_for(copy, current_stream(device));
  return copy;
}

/// Uploads of several threads at the same time have a ring each, because they wait.
at::Tensor CopyStreams::upload(const at::Tensor& tensor, c10::Device device) {
  std::shared_ptr<UploadRing> ring;
  {
    MutexLock lock(mutex_);
    auto& idle = idle_rings_[place_of(device)];
    if (!idle.empty()) {
      ring = std::move(idle.back());
      idle.pop_back();
    }
  }
  if (!ring) ring = std::make_shared<UploadRing>(device);
  at::Tensor copy = ring->upload(tensor, in(device));
  MutexLock lock(mutex_);
  idle_rings_[place_of(device)].push_back(std::move(ring));
  return copy;
}

void CopyStreams::share(const at::Tensor& tensor, at::Tensor shared, PendingCopies& copies) {
  const at::NoGradGuard no_grad;
  shared.copy_(tensor.resolve_conj().resolve_neg(), /*non_blocking=*/true);
  copies.mark(current_stream(tensor.device()), events_);
}

at::Tensor CopyStreams::from_shared(const at::Tensor& shared, c10::Device device) {
  at::Tensor copy;
  {
    StreamsScope scope;
    if (device::has_streams(device)) scope.enter(in(device));
    copy = at::empty_strided(shared.sizes(), shared.strides(), shared.options().device(device));
  }
  copy_and_wait(shared, copy);
  if (device::has_streams(device)) keep_memory_for(copy, current_stream(device));
  return copy;
}

void CopyStreams::copy_and_wait(const at::Tensor& source, at::Tensor target) {
  const at::NoGradGuard no_grad;
  const c10::Device from = source.device(), to = target.device();
  StreamsScope scope;
  if (device::has_streams(from)) scope.enter(in(from));
  if (device::has_streams(to) && to != from) scope.enter(in(to));
  target.copy_(source, /*non_blocking=*/!to.is_cpu());
  if (device::has_streams(from)) in(from).synchronize();
  if (device::has_streams(to) && to != from) in(to).synchronize();
}

void CopyStreams::order_defaults_after(const Streams& streams) const {
  for (const c10::Stream& stream : streams) order_after(default_stream(stream.device()), stream, *events_);
}

void CopyStreams::order_after_defaults(const Streams& streams) const {
  for (const c10::Stream& stream : streams) order_after(stream, default_stream(stream.device()), *events_);
}

}  // namespace torchspan::device
