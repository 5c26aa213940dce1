#include "collective/api/event_gate.h"

#include <ATen/core/ivalue.h>

namespace torchspan::collective {

EventGate::EventGate(const c10::Stream& stream, device::EventPoolPtr events, std::vector<at::Tensor> values,
                     Gates earlier)
    : events_(std::move(events)),
      mark_(stream, events_),
      values_(std::move(values)),
      earlier_(std::move(earlier)) {}

std::shared_ptr<EventGate> EventGate::record(const c10::Stream& stream, device::EventPoolPtr events,
                                             std::vector<at::Tensor> values, Gates earlier) {
  std::erase(earlier, nullptr);
  return std::shared_ptr<EventGate>(
      new EventGate(stream, std::move(events), std::move(values), std::move(earlier)));
}

void EventGate::throw_if_failed() const {
  MutexLock lock(mutex_);
  if (failure_) throw Error(*failure_);
}

void EventGate::pass() const {
  for (const auto& gate : earlier_) gate->pass();
  throw_if_failed();
  const c10::Stream stream = device::current_stream(mark_.stream().device());
  mark_.hold_back(stream);
  for (const at::Tensor& value : values_) device::keep_memory_for(value, stream);
}

std::shared_ptr<const ValueGate> EventGate::renew() const {
  return record(device::current_stream(mark_.stream().device()), events_, {}, {shared_from_this()});
}

bool EventGate::done() const {
  throw_if_failed();
  bool finished = mark_.reached();
  for (const auto& gate : earlier_) finished = gate->done() && finished;
  if (!finished) return false;
  MutexLock lock(mutex_);
  if (failure_) throw Error(*failure_);
  finished_ = true;
  return true;
}

void EventGate::fail(const Error& cause) {
  MutexLock lock(mutex_);
  if (!finished_ && !failure_) failure_ = cause;
}

}  // namespace torchspan::collective
