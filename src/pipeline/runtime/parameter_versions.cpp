#include "pipeline/runtime/parameter_versions.h"

#include <fmt/format.h>
#include <map>
#include <utility>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/pipeline/deferred_batch_norm.h>

#include "pipeline/runtime/gradient_fields.h"

namespace torchspan::pipeline {
namespace {

/// Gives a parameter the memory and the version counter of `value`. Graphs compare the counter with the one at their
/// forward, so each value has its own.
void hold_value(const at::Tensor& parameter, const at::Tensor& value) {
  parameter.set_data(value);
  parameter.unsafeGetTensorImpl()->set_version_counter(value.unsafeGetTensorImpl()->version_counter());
}

}  // namespace

ParameterVersions::Version ParameterVersions::capture() const {
  Version version;
  for (const at::Tensor& parameter : parameters_)
    version.values.push_back(parameter.requires_grad() ? parameter.tensor_data() : at::Tensor());
  version.gradients.resize(parameters_.size());
  return version;
}

void ParameterVersions::swap(Version& version) const {
  const torch::autograd::AutoGradMode no_grad(false);
  at::autocast::clear_cache();  // it finds casts by parameter
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!version.values[i].defined()) continue;
    at::Tensor held = parameters_[i].tensor_data();
    hold_value(parameters_[i], version.values[i]);
    version.values[i] = std::move(held);
    std::swap(parameters_[i].mutable_grad(), version.gradients[i]);
  }
}

void ParameterVersions::renew(const Version& shared) const {
  const torch::autograd::AutoGradMode no_grad(false);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& value = shared.values[i];
    if (value.defined() && value.is_alias_of(parameters_[i]))
      hold_value(parameters_[i], parameters_[i].tensor_data().clone());
  }
}

void ParameterVersions::add_gradients(Version& version) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (version.gradients[i].defined())
      put_gradient(parameters_[i], parameters_[i].grad(), std::move(version.gradients[i]));
  }
}

std::string why_not_versioned(const LocalPipeline& local) {
  std::map<const void*, std::pair<const void*, std::string>> by_memory;
  for (std::size_t layer = 0; layer < local.layers.size(); ++layer) {
    const auto& module = local.layers[layer].module;
    if (!module) continue;
    for (const auto& part : module->modules()) {
      if (dynamic_cast<StepStatistics*>(part.get()) == nullptr) continue;
      return fmt::format(
          "PipelineOptions::staleness is 1, but layer {} ('{}') on worker '{}' has a DeferredBatchNorm, "
          "which gathers statistics of one step at a time; set staleness to 0",
          layer, local.plan.layers[layer], local.worker.name());
    }
    for (const auto& item : module->named_parameters()) {
      const at::Tensor& parameter = item.value();
      if (!parameter.defined() || !parameter.requires_grad() || !parameter.has_storage()) continue;
      const std::string name =
          fmt::format("parameter '{}' of layer {} ('{}')", item.key(), layer, local.plan.layers[layer]);
      const auto [place, fresh] = by_memory.emplace(parameter.storage().unsafeGetStorageImpl(),
                                                    std::pair{parameter.unsafeGetTensorImpl(), name});
      if (fresh || place->second.first == parameter.unsafeGetTensorImpl()) continue;
      return fmt::format(
          "PipelineOptions::staleness is 1, but {} and {} on worker '{}' share memory, which a second "
          "version of each would not; give each its own memory, or set staleness to 0",
          place->second.second, name, local.worker.name());
    }
  }
  return "";
}

}  // namespace torchspan::pipeline
