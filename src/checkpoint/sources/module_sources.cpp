#include <algorithm>
#include <fmt/format.h>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/checkpoint/sources.h>
#include <torchspan/core/error.h>
#include <torchspan/pipeline/pipeline.h>

#include "checkpoint/sources/module_tensors.h"
#include "checkpoint/state/names.h"

namespace torchspan::checkpoint {
namespace {

class ModuleSource final : public StateSource {
 public:
  explicit ModuleSource(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {
    if (!module_) throw_invalid("a module to save is null");
  }

  void save(StateWriter& writer) const override { save_module_tensors(writer, tensors()); }
  void load(const StateReader& reader) override {
    // Without a prefix the other tensors of the checkpoint belong to other objects.
    load_module_tensors(reader, tensors(), {.allow_unexpected = reader.full_name("").empty()});
  }

 private:
  std::vector<ModuleTensor> tensors() const {
    std::vector<ModuleTensor> all;
    append_module_tensors(all, *module_, "");
    return all;
  }

  const std::shared_ptr<torch::nn::Module> module_;
};

constexpr const char* kTrainingSteps = "training_steps";

/// Nullopt for the checkpoints of earlier releases.
std::optional<std::int64_t> training_steps_in(const StateReader& reader) {
  std::optional<Value> value;
  try {
    value = reader.value(kTrainingSteps);
  } catch (const Error&) {  // there is no such value
    return std::nullopt;
  }
  return detail::value_as<std::int64_t>(*value);
}

std::string layer_prefix(int layer) { return fmt::format("layers.{}", layer); }

/// The parameters and buffers of this worker's layers. The first name of a tied parameter is that of the first copy.
std::vector<ModuleTensor> pipeline_tensors(const pipeline::Pipeline& pipeline) {
  std::vector<ModuleTensor> all;
  for (int layer = 0; layer < static_cast<int>(pipeline.plan().layers.size()); ++layer) {
    if (const auto module = pipeline.module(layer)) append_module_tensors(all, *module, layer_prefix(layer));
  }
  for (const auto& tie : pipeline.ties()) {
    const auto name_of = [](const pipeline::TiedParameter& parameter) {
      return join_names(layer_prefix(parameter.layer), parameter.name);
    };
    for (ModuleTensor& entry : all) {
      const bool tied = std::any_of(tie.begin(), tie.end(), [&](const pipeline::TiedParameter& parameter) {
        return std::find(entry.names.begin(), entry.names.end(), name_of(parameter)) != entry.names.end();
      });
      if (tied) entry.names.insert(entry.names.begin(), name_of(tie.front()));
    }
  }
  return all;
}

class PipelineSource final : public StateSource {
 public:
  explicit PipelineSource(pipeline::Pipeline& pipeline) : pipeline_(pipeline) {}

  void save(StateWriter& writer) const override {
    require_no_batch("saved");
    std::vector<ModuleTensor> once;
    for (ModuleTensor& entry : pipeline_tensors(pipeline_)) {
      const bool known = std::any_of(once.begin(), once.end(), [&](const ModuleTensor& other) {
        return other.names.front() == entry.names.front();
      });
      if (!known) once.push_back(std::move(entry));
    }
    save_module_tensors(writer, once);
    writer.add_value(kTrainingSteps, static_cast<std::int64_t>(pipeline_.training_steps()));
  }
  void load(const StateReader& reader) override {
    require_no_batch("restored");
    const std::optional<std::int64_t> steps = training_steps_in(reader);
    load_module_tensors(reader, pipeline_tensors(pipeline_), {.allow_unexpected = true});
    if (steps) pipeline_.set_training_steps(static_cast<std::uint64_t>(*steps));
  }
  bool owns_names() const override { return false; }

 private:
  /// The gradients of a batch in flight belong to the parameters with which it began, which nothing else has.
  void require_no_batch(const char* what) const {
    if (!pipeline_.in_flight()) return;
    throw_invalid(fmt::format(
        "a batch of the pipeline is in flight (PipelineOptions::staleness is 1), so the pipeline cannot be "
        "{}: call finish() on all workers and apply its gradients first",
        what));
  }

  pipeline::Pipeline& pipeline_;
};

}  // namespace

SourcePtr module_source(std::shared_ptr<torch::nn::Module> module) {
  return std::make_unique<ModuleSource>(std::move(module));
}

SourcePtr module_source(torch::nn::Module& module) {
  return module_source(std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &module));
}

SourcePtr pipeline_source(pipeline::Pipeline& pipeline) { return std::make_unique<PipelineSource>(pipeline); }

std::vector<std::string> parameter_names(const pipeline::Pipeline& pipeline) {
  const std::vector<ModuleTensor> all = pipeline_tensors(pipeline);
  std::vector<std::string> names;
  for (const at::Tensor& parameter : pipeline.parameters()) {
    for (const ModuleTensor& entry : all) {
      if (!entry.tensor.is_same(parameter)) continue;
      // A second copy on one worker is a parameter with its own state.
      const bool taken = std::find(names.begin(), names.end(), entry.names.front()) != names.end();
      names.push_back(taken ? entry.names.back() : entry.names.front());
    }
  }
  return names;
}

}  // namespace torchspan::checkpoint
