#include "data_parallel/streams.h"

#include <algorithm>

#include "collective/api/event_gate.h"

namespace torchspan::data_parallel {

ReductionStream::ReductionStream(c10::Device device) : device_(device) {
  if (!device.is_cpu()) stream_ = device::stream_from_pool(device);
}

std::optional<c10::Stream> ReductionStream::current() const {
  if (!stream_) return std::nullopt;
  return device::current_stream(device_);
}

std::shared_ptr<const ValueGate> ReductionStream::gate(
    std::vector<std::shared_ptr<const ValueGate>> earlier) const {
  if (!stream_) return nullptr;
  return collective::EventGate::record(*stream_, events_, {}, std::move(earlier));
}

PassStreamScope::PassStreamScope(const std::optional<c10::Stream>& pass, device::EventPoolPtr events)
    : pass_(pass), events_(std::move(events)) {
  if (!pass_) return;
  own_ = device::current_stream(pass_->device());
  current_.enter(*pass_);
}

PassStreamScope::~PassStreamScope() {
  if (!own_) return;
  try {
    device::order_after(*own_, *pass_, *events_);
  } catch (...) {  // the device has failed; the next operation on it reports that
  }
}

void ProducerStreams::add(const c10::Stream& stream) {
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

void ProducerStreams::record(const device::EventPoolPtr& events) {
  for (const c10::Stream& stream : streams_) marks_.emplace_back(stream, events);
}

void ProducerStreams::wait(device::EventPool& events) const {
  for (const device::Mark& mark : marks_) mark.hold_back(device::current_stream(mark.stream().device()));
  if (!marks_.empty()) return;
  for (const c10::Stream& stream : streams_) {
    device::order_after(device::current_stream(stream.device()), stream, events);
  }
}

}  // namespace torchspan::data_parallel
