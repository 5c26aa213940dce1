#include "rpc/tensor_parts/split_tensor.h"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <torchspan/core/error.h>

#include "rpc/tensor_parts/messages.h"

namespace torchspan::rpc {
namespace {

at::Tensor copy_without_graph(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.clone();
}

}  // namespace

bool PartLine::enter(std::uint64_t number) {
  MutexLock lock(mutex_);
  if (alive_ >= kMostTensors) return false;
  ++alive_;
  waiting_.push_back(number);
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
  MutexLock lock(mutex_);
  std::erase(waiting_, number);
  --alive_;
}

SplitTensor::SplitTensor(Way way, const at::Tensor& tensor, const device::EventPoolPtr& events)
    : way_(std::move(way)), captured_(copy_without_graph(tensor)), total_(captured_.nbytes()) {
  captured_at_.emplace(device::current_stream(captured_.device()), events);
}

SplitTensor::~SplitTensor() {
  if (way_.line->is_first(way_.number)) way_.line->ring().discard();
  way_.line->forget(way_.number);
  if (!channel_) return;
  try {
    send({});
  } catch (const std::exception&) {  // the peer forgets the parts when the connection ends
  }
}

void SplitTensor::fill() {
  if (copied_ == total_ || !way_.line->is_first(way_.number)) return;
  device::DownloadRing& ring = way_.line->ring();
  if (captured_at_) {
    captured_at_->hold_back(ring.stream());
    captured_at_.reset();
    device::keep_memory_for(captured_, ring.stream());
  }
  for (std::size_t count = 0; copied_ < total_; copied_ += count) {
    count = std::min(ring.part(), total_ - copied_);
    if (!ring.fill(captured_, copied_, count)) return;
  }
}

bool SplitTensor::can_advance() const {
  if (done() || !way_.line->is_first(way_.number)) return false;
  const device::DownloadRing& ring = way_.line->ring();
  return ring.ready() || (copied_ < total_ && ring.has_room());
}

void SplitTensor::advance(const std::shared_ptr<net::Channel>& channel) {
  if (done() || !way_.line->is_first(way_.number)) return;
  fill();
  while (std::optional<Segment> part = way_.line->ring().take()) {
    channel_ = channel;
    try {
      send({&*part, 1});
    } catch (...) {
      if (sent_ == 0) channel_.reset();
      throw;
    }
    sent_ += part->size;
    part.reset();  // the channel may have released it already
    fill();
  }
  if (!done()) return;
  way_.line->leave(way_.number);
  captured_ = at::Tensor();
}

void SplitTensor::send(std::span<const Segment> part) const {
  wire::Frame frame;
  frame.header.type = TensorPart::kType;
  frame.header.flags = wire::kFlagOneWay;
  frame.header.instance = way_.sender.instance;
  frame.header.version = way_.sender.version;
  frame.value = wire::to_payload(TensorPart{way_.number, total_}).value;
  channel_->send(wire::encode_frame(frame), part);
}

}  // namespace torchspan::rpc
