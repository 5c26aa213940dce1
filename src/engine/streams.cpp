#include "engine/streams.h"

#include <algorithm>

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "engine/api/compat.h"

namespace torchspan::engine {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
}

void order_after(const c10::Stream& later, const c10::Stream& earlier) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

void keep_memory_for(const at::Tensor& tensor, const c10::Stream& stream) {
  if (tensor.is_sparse()) {
    const at::SparseTensorImpl& sparse = compat::sparse_impl(tensor);
    keep_memory_for(sparse.indices(), stream);
    keep_memory_for(sparse.values(), stream);
  } else if (tensor.has_storage()) {
    c10::impl::VirtualGuardImpl(stream.device_type())
        .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

}  // namespace

bool has_cuda() {
  return c10::impl::hasDeviceGuardImpl(c10::kCUDA) &&
         c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount() > 0;
}

NodeStreamScope::NodeStreamScope(const torch::autograd::Node& node, bool cuda) {
  if (!cuda) return;
  for (std::uint32_t input = 0; input < node.num_inputs(); ++input) {
    const auto& metadata = node.input_metadata(input);
    if (!metadata.device().is_cuda()) continue;
    stream_.push_back(metadata.stream());
    guard_.reset_stream(metadata.stream());
    return;
  }
}

HandOverScope::HandOverScope(const at::Tensor& gradient, const torch::autograd::Node& consumer,
                             std::uint32_t input) {
  if (!gradient.defined() || !gradient.is_cuda() || input >= consumer.num_inputs()) return;
  const auto& metadata = consumer.input_metadata(input);
  if (metadata.device() != gradient.device()) return;
  const c10::Stream producer = current_stream(gradient.device());
  const c10::Stream used_on = metadata.stream();
  if (producer != used_on) {
    order_after(used_on, producer);
    keep_memory_for(gradient, used_on);
  }
  guard_.reset_stream(used_on);
}

struct ArrivalEvents::Recorded {
  explicit Recorded(c10::Device device) : device(device), event(device.type()) {
    event.record(current_stream(device));
  }
  const c10::Device device;
  c10::Event event;
};

ArrivalEvents::ArrivalEvents(const torch::autograd::variable_list& gradients, bool cuda) {
  if (!cuda) return;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined() || !gradient.is_cuda()) continue;
    const c10::Device device = gradient.device();
    const bool known = std::any_of(events_.begin(), events_.end(),
                                   [&](const auto& event) { return event->device == device; });
    if (!known) events_.push_back(std::make_shared<Recorded>(device));
  }
}

void ArrivalEvents::wait() const {
  for (const auto& recorded : events_) recorded->event.block(current_stream(recorded->device));
}

CallerStreams::CallerStreams(bool cuda) {
  if (!cuda) return;
  const auto* guard = c10::impl::getDeviceGuardImpl(c10::kCUDA);
  for (c10::DeviceIndex index = 0; index < guard->deviceCount(); ++index) {
    caller_.push_back(guard->getStream(c10::Device(c10::kCUDA, index)));
  }
}

void CallerStreams::leaf_used(const c10::Stream& stream) {
  if (std::find(leaves_.begin(), leaves_.end(), stream) == leaves_.end()) leaves_.push_back(stream);
}

void CallerStreams::join() {
  for (const c10::Stream& leaf : leaves_) {
    const c10::Stream& caller = caller_.at(static_cast<std::size_t>(leaf.device_index()));
    if (caller != leaf) order_after(caller, leaf);
  }
  leaves_.clear();
}

}  // namespace torchspan::engine
