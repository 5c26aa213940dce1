#include "pipeline/runtime/local_pipeline.h"

#include <torch/nn/module.h>

#include <torchspan/detail/device/streams.h>

namespace torchspan::pipeline {

std::optional<c10::Device> LocalPipeline::device_of_range(int range) const {
  const LayerRange& orders = plan.layer_ranges[static_cast<std::size_t>(range)];
  std::optional<c10::Device> device;
  for (int order = orders.first; order <= orders.last && device::has_streams(); ++order) {
    const LayerUse& use = uses[static_cast<std::size_t>(order)];
    const auto& module = layers[static_cast<std::size_t>(use.layer)].module;
    if (!module) continue;
    for (const at::Tensor& parameter : module->parameters()) {
      const bool same = !device || *device == parameter.device();
      if (!same || !device::has_streams(parameter.device())) return std::nullopt;
      device = parameter.device();
    }
  }
  return device;
}

}  // namespace torchspan::pipeline
