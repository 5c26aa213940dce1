#include "pipeline/runtime/overlap.h"

#include <fmt/format.h>
#include <map>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/pipeline/deferred_batch_norm.h>

#include "core/api/throw_invalid.h"

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

void check_versions(const LocalPipeline& local) {
  std::map<const void*, std::pair<const void*, std::string>> by_memory;
  for (std::size_t layer = 0; layer < local.layers.size(); ++layer) {
    const auto& module = local.layers[layer].module;
    if (!module) continue;
    for (const auto& part : module->modules()) {
      if (dynamic_cast<StepStatistics*>(part.get()) == nullptr) continue;
      throw_invalid(
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
      throw_invalid(
          "PipelineOptions::staleness is 1, but {} and {} on worker '{}' share memory, which a second "
          "version of each would not; give each its own memory, or set staleness to 0",
          place->second.second, name, local.worker.name());
    }
  }
}

/// Keeps the current exception as the failure of a step. Reports it unless it is the report of another worker.
void OverlappedSteps::fail(Entry& entry) {
  try {
    throw;
  } catch (const EndedElsewhere& error) {
    entry.failure.emplace(error);
  } catch (...) {
    entry.failure.emplace(to_error(std::current_exception()));
    local_.report_failure(entry.id, *entry.failure);
  }
}

void OverlappedSteps::begin(std::uint64_t id, const std::function<StepWork()>& prepare) {
  // Of a step that has failed, nothing can follow: end() throws.
  if (older_ && older_->failure) return;
  newer_ = std::make_unique<Entry>();
  newer_->id = id;
  newer_->version = versions_.capture();
  try {
    newer_->step = std::make_unique<Step>(local_, prepare());
  } catch (...) {
    fail(*newer_);
  }
}

OverlappedSteps::Ended OverlappedSteps::run_older() {
  if (older_->failure) throw EndedElsewhere(*older_->failure);
  const VersionScope scope(versions_, older_->version);
  older_->step->run_to_end(newer_ ? this : nullptr);
  return {older_->step->report(), older_->step->loss(), trains()};
}

std::optional<OverlappedSteps::Ended> OverlappedSteps::end() {
  std::optional<Ended> ended;
  if (older_) {
    try {
      ended = run_older();
    } catch (const EndedElsewhere& error) {
      drop();
      throw Error(error);
    } catch (...) {
      const Error error = to_error(std::current_exception());
      local_.report_failure(older_->id, error);
      drop();
      throw error;
    }
    versions_.add_gradients(older_->version);
  }
  older_ = std::move(newer_);
  if (older_) versions_.renew(older_->version);
  return ended;
}

bool OverlappedSteps::run_next(int held) {
  if (newer_->failure) return false;
  const auto action = newer_->step->next_early(held);
  if (!action) return false;
  try {
    const VersionScope scope(versions_, newer_->version);
    newer_->step->run_early(*action);
  } catch (...) {
    fail(*newer_);
  }
  return true;
}

void OverlappedSteps::accept_next(StepEvent& event) {
  if (newer_->failure) return;
  try {
    newer_->step->accept(event);
  } catch (...) {
    fail(*newer_);
  }
}

/// A step that has not ended restores `.grad`, which must be its own.
void OverlappedSteps::drop(std::unique_ptr<Entry>& entry) {
  if (!entry) return;
  const VersionScope scope(versions_, entry->version);
  entry->step.reset();
}

void OverlappedSteps::drop() {
  drop(newer_);
  drop(older_);
  newer_.reset();
  older_.reset();
}

}  // namespace torchspan::pipeline
