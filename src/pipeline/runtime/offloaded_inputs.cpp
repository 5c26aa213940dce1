#include "pipeline/runtime/offloaded_inputs.h"

#include <utility>

#include <torchspan/detail/device/streams.h>

namespace torchspan::pipeline {

void OffloadedInputs::put(device::Offloader& offloader, std::map<int, Activation>& inputs) {
  for (auto& [link, activation] : inputs) {
    if (link == kOutside) continue;
    for (std::size_t member = 0; member < activation.batch.members.size(); ++member) {
      c10::IValue& value = activation.batch.members[member];
      if (!is_defined_tensor(value) || value.toTensor().layout() != at::kStrided ||
          !device::has_streams(value.toTensor().device()))
        continue;
      at::Tensor tensor = value.toTensor();
      value = c10::IValue();
      places_.push_back({link, member, offloader.offload(std::move(tensor))});
    }
  }
}

void OffloadedInputs::prefetch() {
  for (Place& place : places_) place.tensor.prefetch();
}

void OffloadedInputs::restore(std::map<int, Activation>& inputs) {
  for (Place& place : places_) inputs.at(place.link).batch.members[place.member] = place.tensor.take();
  places_.clear();
}

}  // namespace torchspan::pipeline
