#include "pipeline/state_source.h"

#include <algorithm>
#include <fmt/format.h>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>

#include <torchspan/core/error.h>
#include <torchspan/pipeline/pipeline.h>

#include "state/api/save_load.h"

namespace torchspan::pipeline {
namespace {

constexpr const char* kTrainingSteps = "training_steps";

/// Nullopt for the checkpoints of earlier releases.
std::optional<std::int64_t> training_steps_in(const state::StateReader& reader) {
  std::optional<state::Value> value;
  try {
    value = reader.value(kTrainingSteps);
  } catch (const Error&) {  // there is no such value
    return std::nullopt;
  }
  return state::value_as<std::int64_t>(*value);
}

std::string layer_prefix(int layer) { return fmt::format("layers.{}", layer); }

/// The parameters and buffers of this worker's layers. The first name of a tied parameter is that of the first copy.
std::vector<state::ModuleTensor> pipeline_tensors(const Pipeline& pipeline) {
  std::vector<state::ModuleTensor> all;
  for (int layer = 0; layer < static_cast<int>(pipeline.plan().layers.size()); ++layer) {
    if (const auto module = pipeline.module(layer))
      state::append_module_tensors(all, *module, layer_prefix(layer));
  }
  for (const auto& tie : pipeline.ties()) {
    const auto name_of = [](const TiedParameter& parameter) {
      return state::join_names(layer_prefix(parameter.layer), parameter.name);
    };
    for (state::ModuleTensor& entry : all) {
      const bool tied = std::any_of(tie.begin(), tie.end(), [&](const TiedParameter& parameter) {
        return std::find(entry.names.begin(), entry.names.end(), name_of(parameter)) != entry.names.end();
      });
      if (tied) entry.names.insert(entry.names.begin(), name_of(tie.front()));
    }
  }
  return all;
}

class PipelineSource final : public state::StateSource {
 public:
  explicit PipelineSource(Pipeline& pipeline) : pipeline_(pipeline) {}

  void save(state::StateWriter& writer) const override {
    require_no_batch("saved");
    std::vector<state::ModuleTensor> once;
    for (state::ModuleTensor& entry : pipeline_tensors(pipeline_)) {
      const bool known = std::any_of(once.begin(), once.end(), [&](const state::ModuleTensor& other) {
        return other.names.front() == entry.names.front();
      });
      if (!known) once.push_back(std::move(entry));
    }
    state::save_module_tensors(writer, once);
    writer.add_value(kTrainingSteps, static_cast<std::int64_t>(pipeline_.training_steps()));
  }
  void load(const state::StateReader& reader) override {
    require_no_batch("restored");
    const std::optional<std::int64_t> steps = training_steps_in(reader);
    state::load_module_tensors(reader, pipeline_tensors(pipeline_), {.allow_unexpected = true});
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

  Pipeline& pipeline_;
};

}  // namespace

state::SourcePtr source_of(Pipeline& pipeline) { return std::make_unique<PipelineSource>(pipeline); }

std::vector<std::string> names_of_parameters(const Pipeline& pipeline) {
  const std::vector<state::ModuleTensor> all = pipeline_tensors(pipeline);
  std::vector<std::string> names;
  for (const at::Tensor& parameter : pipeline.parameters()) {
    for (const state::ModuleTensor& entry : all) {
      if (!entry.tensor.is_same(parameter)) continue;
      // A second copy on one worker is a parameter with its own state.
      const bool taken = std::find(names.begin(), names.end(), entry.names.front()) != names.end();
      names.push_back(taken ? entry.names.back() : entry.names.front());
    }
  }
  return names;
}

}  // namespace torchspan::pipeline
