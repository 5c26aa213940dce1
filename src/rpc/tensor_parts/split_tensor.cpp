#include "rpc/tensor_parts/split_tensor.h"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <torchspan/core/error.h>

#include "rpc/tensor_parts/messages.h"

namespace torchspan::rpc {

std::size_t HostBuffers::fill(const at::Tensor& tensor, std::size_t from) {
  const std::size_t count = std::min(ring_.part(), tensor.nbytes() - from);
  return ring_.fill(tensor, from, count) ? count : 0;
}

std::optional<Part> HostBuffers::take() {
  std::optional<Segment> segment = ring_.take();
  if (!segment) return std::nullopt;
  return Part{std::move(*segment)};
}

namespace {

at::Tensor copy_without_graph(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.clone();
}

}  // namespace

bool PartLine::enter(std::uint64_t number) {
  if (alive_->fetch_add(1) >= kMostTensors) {
    alive_->fetch_sub(1);
    return false;
  }
  try {
    MutexLock lock(mutex_);
    waiting_.push_back(number);
  } catch (...) {  // no memory
    alive_->fetch_sub(1);
    throw;
  }
  return true;
}

bool PartLine::is_first(std::uint64_t number) const {
  MutexLock lock(mutex_);
  return !waiting_.empty() && waiting_.front() == number;
}

void PartLine::leave(std::uint64_t number) {
  MutexLock lock(mutex_);
  std::erase(waiting_, number);
}

void PartLine::forget(std::uint64_t number) {
  leave(number);
  alive_->fetch_sub(1);
}

SplitTensor::SplitTensor(Route route, const at::Tensor& tensor, const device::EventPoolPtr& events)
    : route_(std::move(route)), captured_(copy_without_graph(tensor)), total_(captured_.nbytes()) {
  captured_at_.emplace(device::current_stream(captured_.device()), events);
}

SplitTensor::~SplitTensor() {
  if (route_.line->is_first(route_.number)) route_.line->buffers().discard();
  route_.line->forget(route_.number);
  if (!channel_) return;
  try {
    send(std::nullopt);
  } catch (const std::exception&) {  // the peer forgets the parts when the connection ends
  }
}

void SplitTensor::fill() {
  if (copied_ == total_ || !route_.line->is_first(route_.number)) return;
  PartBuffers& buffers = route_.line->buffers();
  if (captured_at_) {
    captured_at_->hold_back(buffers.stream());
    captured_at_.reset();
    device::keep_memory_for(captured_, buffers.stream());
  }
  for (std::size_t count = 1; copied_ < total_ && count != 0; copied_ += count)
    count = buffers.fill(captured_, copied_);
}

bool SplitTensor::can_advance() const {
  if (done() || !route_.line->is_first(route_.number)) return false;
  PartBuffers& buffers = route_.line->buffers();
  return buffers.ready() || (copied_ < total_ && buffers.has_room(total_ - copied_));
}

std::size_t SplitTensor::advance(const std::shared_ptr<net::Channel>& channel) {
  if (done() || !route_.line->is_first(route_.number)) return 0;
  std::size_t carried = 0;
  PartBuffers& buffers = route_.line->buffers();
  fill();
  while (std::optional<Part> part = buffers.take()) {
    channel_ = channel;
    try {
      send(part);
    } catch (...) {
      if (sent_ == 0) channel_.reset();
      throw;
    }
    buffers.sent(*part, channel);
    sent_ += part->bytes();
    if (!part->lent) carried += part->bytes();
    part.reset();  // the channel may have released it already
    fill();
  }
  if (!done()) return carried;
  route_.line->leave(route_.number);
  captured_ = at::Tensor();
  return carried;
}

/// The peer may return lent memory before send() has returned.
void SplitTensor::send(const std::optional<Part>& part) const {
  wire::Frame frame;
  frame.header.type = TensorPart::kType;
  frame.header.flags = wire::kFlagOneWay;
  frame.header.instance = route_.sender.instance;
  frame.header.version = route_.sender.version;
  frame.value = wire::to_payload(TensorPart{route_.number, total_}).value;
  if (!part || !part->lent) {
    const std::size_t segments = part ? 1 : 0;
    return channel_->send(wire::encode_frame(frame), {part ? &part->segment : nullptr, segments});
  }
  frame.header.features = kPartsInDeviceMemory;
  frame.blobs.push_back({kDeviceMemoryBlob, wire::to_payload(SharedPlaces{{part->lent->place(0)}}).value});
  part->lent->lend();
  try {
    channel_->send(wire::encode_frame(frame), {});
  } catch (...) {
    part->lent->take_back();
    throw;
  }
}

}  // namespace torchspan::rpc
