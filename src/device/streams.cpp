#include <algorithm>
#include <array>
#include <functional>

#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <torchspan/detail/device/streams.h>

#include "device/api/compat.h"
#include "device/api/devices.h"

namespace torchspan::device {
namespace {

using Guard = c10::impl::DeviceGuardImplInterface;

constexpr std::array kTypes{c10::DeviceType::CUDA, c10::DeviceType::HIP, c10::DeviceType::XPU,
                            c10::DeviceType::PrivateUse1};

/// All devices of this process that have streams.
const std::vector<c10::Device>& devices() {
  static const std::vector<c10::Device> found = [] {
    std::vector<c10::Device> all;
    for (const c10::DeviceType type : kTypes) {
      const int count = count_devices(type).count;
      for (int index = 0; index < count; ++index)
        all.emplace_back(type, static_cast<c10::DeviceIndex>(index));
    }
    return all;
  }();
  return found;
}

const Guard& guard_of(c10::Device device) { return *c10::impl::getDeviceGuardImpl(device.type()); }

}  // namespace

bool has_streams() {
  static const bool any = !devices().empty();
  return any;
}

bool has_streams(c10::Device device) {
  if (device.is_cpu() || !has_streams()) return false;
  const auto& all = devices();
  return std::any_of(all.begin(), all.end(),
                     [&](const c10::Device& one) { return one.type() == device.type(); });
}

c10::Stream current_stream(c10::Device device) { return guard_of(device).getStream(device); }
c10::Stream default_stream(c10::Device device) { return guard_of(device).getDefaultStream(device); }
c10::Stream stream_from_pool(c10::Device device, bool high_priority) {
  return guard_of(device).getStreamFromGlobalPool(device, high_priority);
}

/// Like all that the driver does with an event, its end needs its device as the thread's current one: LibTorch restores
/// the device from before, for which CUDA would make a context.
EventPool::~EventPool() {
  for (auto& [device, event] : free_) {
    try {
      const c10::DeviceGuard guard(device);
      event.reset();
    } catch (const std::exception&) {  // a device that has failed
    }
  }
}

std::unique_ptr<c10::Event> EventPool::take(c10::Device device) {
  {
    MutexLock lock(mutex_);
    const auto found =
        std::find_if(free_.rbegin(), free_.rend(), [&](const auto& entry) { return entry.first == device; });
    if (found != free_.rend()) {
      std::unique_ptr<c10::Event> event = std::move(found->second);
      free_.erase(std::next(found).base());
      return event;
    }
  }
  return std::make_unique<c10::Event>(device.type());
}

void EventPool::give(c10::Device device, std::unique_ptr<c10::Event> event) {
  MutexLock lock(mutex_);
  free_.emplace_back(device, std::move(event));
}

Mark::Mark(const c10::Stream& stream, EventPoolPtr events)
    : stream_(stream), events_(std::move(events)), event_(events_->take(stream.device())) {
  const c10::DeviceGuard guard(stream.device());
  event_->record(stream);
}

Mark::~Mark() {
  if (event_) events_->give(stream_.device(), std::move(event_));
}

void Mark::hold_back(const c10::Stream& later) const {
  if (later == stream_) return;
  const c10::DeviceGuard guard(later.device());
  event_->block(later);
}

/// CUDA would otherwise make a context on this thread's current device, which is device 0 on most threads.
bool Mark::reached() const {
  const c10::DeviceGuard guard(stream_.device());
  return event_->query();
}

void Mark::synchronize() const {
  const c10::DeviceGuard guard(stream_.device());
  if (event_->query()) return;
  try {
    compat::synchronize(*event_);
  } catch (const std::exception&) {  // not every backend can wait for an event
    stream_.synchronize();
  }
}

void Mark::wait() const noexcept {
  try {
    synchronize();
  } catch (const std::exception&) {  // a device that has failed runs nothing any more
  }
}

/// A stream waits for the record at the time of the call, so the event is free at once.
void order_after(const c10::Stream& later, const c10::Stream& earlier) {
  EventPool once;
  order_after(later, earlier, once);
}

void order_after(const c10::Stream& later, const c10::Stream& earlier, EventPool& events) {
  if (later == earlier) return;
  std::unique_ptr<c10::Event> event = events.take(earlier.device());
  {
    const c10::DeviceGuard guard(earlier.device());
    event->record(earlier);
  }
  {
    const c10::DeviceGuard guard(later.device());
    event->block(later);
  }
  events.give(earlier.device(), std::move(event));
}

void visit_parts(const at::Tensor& tensor, const std::function<void(const at::Tensor&)>& visit) {
  if (!tensor.defined()) return;
  if (tensor.layout() == at::kSparse) {
    const at::SparseTensorImpl& sparse = compat::sparse_impl(tensor);
    visit(sparse.indices());
    visit(sparse.values());
  } else if (tensor.layout() == at::kSparseCsr || tensor.layout() == at::kSparseCsc ||
             tensor.layout() == at::kSparseBsr || tensor.layout() == at::kSparseBsc) {
    const at::SparseCsrTensorImpl& sparse = compat::compressed_impl(tensor);
    visit(sparse.compressed_indices());
    visit(sparse.plain_indices());
    visit(sparse.values());
  } else if (tensor.has_storage()) {
    visit(tensor);
  }
}

void keep_memory_for(const at::Tensor& tensor, const c10::Stream& stream) {
  visit_parts(tensor, [&](const at::Tensor& part) {
    if (!part.has_storage() || part.device() != stream.device()) return;
    c10::impl::VirtualGuardImpl(stream.device_type())
        .recordDataPtrOnStream(part.storage().data_ptr(), stream);
  });
}

Streams Streams::current() {
  Streams streams;
  if (!has_streams()) return streams;
  for (const c10::Device& device : devices()) streams.streams_.push_back(current_stream(device));
  return streams;
}

Streams Streams::current_side() {
  Streams streams;
  if (!has_streams()) return streams;
  for (const c10::Device& device : devices()) {
    const c10::Stream here = current_stream(device);
    if (here != default_stream(device)) streams.streams_.push_back(here);
  }
  return streams;
}

const c10::Stream* Streams::of(c10::Device device) const {
  const auto found = std::find_if(streams_.begin(), streams_.end(),
                                  [&](const c10::Stream& one) { return one.device() == device; });
  return found == streams_.end() ? nullptr : &*found;
}

void Streams::set(const c10::Stream& stream) {
  const auto found = std::find_if(streams_.begin(), streams_.end(),
                                  [&](const c10::Stream& one) { return one.device() == stream.device(); });
  found == streams_.end() ? streams_.push_back(stream) : static_cast<void>(*found = stream);
}

void StreamsScope::enter(const c10::Stream& stream) {
  before_.push_back(guard_of(stream.device()).exchangeStream(stream));
}

void StreamsScope::enter(const Streams& streams) {
  for (const c10::Stream& stream : streams) enter(stream);
}

StreamsScope::~StreamsScope() {
  for (auto stream = before_.rbegin(); stream != before_.rend(); ++stream)
    guard_of(stream->device()).exchangeStream(*stream);
}

CurrentDevicesScope::CurrentDevicesScope() {
  if (!has_streams()) return;
  for (const c10::Device& device : devices()) {
    if (device.index() != 0) continue;
    try {
      before_.push_back(guard_of(device).getDevice());
    } catch (const std::exception&) {  // a device that has failed: the next operation on it reports that
    }
  }
}

CurrentDevicesScope::~CurrentDevicesScope() {
  for (const c10::Device& device : before_) {
    try {
      if (guard_of(device).getDevice() != device) guard_of(device).uncheckedSetDevice(device);
    } catch (const std::exception&) {  // the same
    }
  }
}

SideStreamsScope::SideStreamsScope(const Streams& side) {
  if (!has_streams()) return;
  before_ = Streams::current_side();
  if (!before_.empty() || !side.empty()) make_current(side);
}

SideStreamsScope::~SideStreamsScope() {
  if (has_streams()) make_current(before_);
}

void SideStreamsScope::make_current(const Streams& side) {
  for (const c10::Device& device : devices()) {
    const c10::Stream* stream = side.of(device);
    guard_of(device).exchangeStream(stream == nullptr ? default_stream(device) : *stream);
  }
}

}  // namespace torchspan::device
