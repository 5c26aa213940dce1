#include "engine/streams.h"

#include <algorithm>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::engine {
namespace {

/// Calls `visit` with the first stream of each device among the inputs of `node`.
template <class F>
void visit_streams(const torch::autograd::Node& node, const F& visit) {
  c10::SmallVector<c10::Device, 2> seen;
  for (std::uint32_t input = 0; input < node.num_inputs(); ++input) {
    const auto& metadata = node.input_metadata(input);
    const c10::Device device = metadata.device();
    if (!device::has_streams(device) || std::find(seen.begin(), seen.end(), device) != seen.end()) continue;
    seen.push_back(device);
    visit(metadata.stream());
  }
}

bool has_other_owners(const at::Tensor& gradient) {
  return gradient.use_count() > 1 || !gradient.has_storage() || gradient.storage().use_count() > 1;
}

}  // namespace

PassStreams::PassStreams(std::optional<device::Streams> caller, device::EventPoolPtr events)
    : any_(device::has_streams()),
      caller_(caller ? *std::move(caller) : device::Streams::current()),
      events_(!any_ || events ? std::move(events) : std::make_shared<device::EventPool>()) {}

c10::Stream PassStreams::of(const torch::autograd::Node& node, c10::Device device) const {
  for (std::uint32_t input = 0; input < node.num_inputs(); ++input) {
    const auto& metadata = node.input_metadata(input);
    if (metadata.device() == device) return metadata.stream();
  }
  const c10::Stream* stream = caller_.of(device);
  return stream == nullptr ? device::current_stream(device) : *stream;
}

void PassStreams::hand_over(at::Tensor& gradient, const torch::autograd::Node& consumer) const {
  if (!any_ || !gradient.defined() || !device::has_streams(gradient.device())) return;
  const c10::Stream producer = device::current_stream(gradient.device());
  const c10::Stream used_on = of(consumer, gradient.device());
  if (producer == used_on) return;
  if (has_other_owners(gradient)) gradient = gradient.clone();
  device::order_after(used_on, producer, *events_);
  device::keep_memory_for(gradient, used_on);
}

void PassStreams::ends_at(const torch::autograd::Node& node) {
  if (!any_) return;
  visit_streams(node, [this](const c10::Stream& stream) {
    if (std::find(ends_.begin(), ends_.end(), stream) == ends_.end()) ends_.push_back(stream);
  });
}

void PassStreams::join() {
  for (const c10::Stream& end : ends_) {
    if (const c10::Stream* caller = caller_.of(end.device())) device::order_after(*caller, end, *events_);
  }
  ends_.clear();
}

NodeStreamScope::NodeStreamScope(const torch::autograd::Node& node, const PassStreams& streams) {
  if (!streams.any()) return;
  visit_streams(node, [this](const c10::Stream& stream) {
    if (!device_.current_device()) device_.reset_device(stream.device());
    streams_.enter(stream);
  });
}

ArrivalMarks::ArrivalMarks(const torch::autograd::variable_list& gradients,
                           const device::EventPoolPtr& events) {
  if (!device::has_streams()) return;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined() || !device::has_streams(gradient.device())) continue;
    const c10::Stream stream = device::current_stream(gradient.device());
    const bool known = std::any_of(marks_.begin(), marks_.end(),
                                   [&](const device::Mark& mark) { return mark.stream() == stream; });
    if (!known) marks_.emplace_back(stream, events);
  }
}

void ArrivalMarks::join(const torch::autograd::variable_list& gradients) const {
  for (const device::Mark& mark : marks_) {
    const c10::Stream here = device::current_stream(mark.stream().device());
    if (here == mark.stream()) continue;
    mark.hold_back(here);
    for (const at::Tensor& gradient : gradients) {
      if (gradient.defined()) device::keep_memory_for(gradient, here);
    }
  }
}

}  // namespace torchspan::engine
