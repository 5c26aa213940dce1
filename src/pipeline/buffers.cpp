#include "pipeline/buffers.h"

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

namespace torchspan::pipeline {

KeptBuffers::KeptBuffers(const LocalPipeline& local, const LayerRange& segment) {
  for (int order = segment.first; order <= segment.last; ++order) {
    const LayerUse& use = local.uses[static_cast<std::size_t>(order)];
    const auto& module = local.layers[static_cast<std::size_t>(use.layer)].module;
    if (!module || !module->is_training()) continue;
    for (const at::Tensor& buffer : module->buffers()) kept_.emplace_back(buffer, buffer.detach().clone());
  }
}

KeptBuffers::~KeptBuffers() {
  const torch::autograd::AutoGradMode mode(false);
  // Backwards, for a buffer that is met twice; and past the version counter: the graph may have saved them.
  for (auto kept = kept_.rbegin(); kept != kept_.rend(); ++kept)
    kept->first.variable_data().copy_(kept->second);
}

}  // namespace torchspan::pipeline
