#include "pipeline/runtime/kept_buffers.h"

#include <algorithm>
#include <exception>

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

namespace torchspan::pipeline {
namespace {

/// Modules in evaluation mode leave their buffers as they are.
bool any_trains(const torch::nn::Module& module) {
  const auto modules = module.modules();
  return std::any_of(modules.begin(), modules.end(), [](const auto& each) { return each->is_training(); });
}

}  // namespace

KeptBuffers::KeptBuffers(const LocalPipeline& local, const LayerRange& range) {
  for (int order = range.first; order <= range.last; ++order) {
    const LayerUse& use = local.uses[static_cast<std::size_t>(order)];
    const auto& module = local.layers[static_cast<std::size_t>(use.layer)].module;
    if (!module || !any_trains(*module)) continue;
    for (const at::Tensor& buffer : module->buffers()) kept_.emplace_back(buffer, buffer.detach().clone());
  }
}

KeptBuffers::~KeptBuffers() {
  while (!kept_.empty()) {
    try {
      restore();
    } catch (const std::exception&) {  // the scope's exception is the one to report
      kept_.pop_back();
    }
  }
}

void KeptBuffers::restore() {
  const torch::autograd::AutoGradMode mode(false);
  // In reverse order, because a buffer may be listed twice. Without changing its version, because the graph
  // may have saved the buffer.
  for (; !kept_.empty(); kept_.pop_back()) kept_.back().first.variable_data().copy_(kept_.back().second);
}

}  // namespace torchspan::pipeline
