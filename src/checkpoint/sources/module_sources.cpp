#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/checkpoint/sources.h>
#include <torchspan/core/error.h>
#include <torchspan/pipeline/pipeline.h>

#include "checkpoint/sources/module_tensors.h"

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

std::string layer_prefix(int layer) { return fmt::format("layers.{}", layer); }

class PipelineSource final : public StateSource {
 public:
  explicit PipelineSource(pipeline::Pipeline& pipeline) : pipeline_(pipeline) {}

  void save(StateWriter& writer) const override { save_module_tensors(writer, tensors()); }
  void load(const StateReader& reader) override {
    load_module_tensors(reader, tensors(), {.allow_unexpected = true});
  }

 private:
  std::vector<ModuleTensor> tensors() const {
    std::vector<ModuleTensor> all;
    for (int layer = 0; layer < static_cast<int>(pipeline_.plan().layers.size()); ++layer) {
      if (const auto module = pipeline_.module(layer))
        append_module_tensors(all, *module, layer_prefix(layer));
    }
    return all;
  }

  pipeline::Pipeline& pipeline_;
};

}  // namespace

SourcePtr module_source(std::shared_ptr<torch::nn::Module> module) {
  return std::make_unique<ModuleSource>(std::move(module));
}

SourcePtr pipeline_source(pipeline::Pipeline& pipeline) { return std::make_unique<PipelineSource>(pipeline); }

std::vector<std::string> parameter_names(const pipeline::Pipeline& pipeline) {
  std::vector<ModuleTensor> all;
  for (int layer = 0; layer < static_cast<int>(pipeline.plan().layers.size()); ++layer) {
    if (const auto module = pipeline.module(layer)) append_module_tensors(all, *module, layer_prefix(layer));
  }
  std::vector<std::string> names;
  for (const at::Tensor& parameter : pipeline.parameters()) {
    for (const ModuleTensor& entry : all) {
      if (entry.tensor.is_same(parameter)) names.push_back(entry.names.front());
    }
  }
  return names;
}

}  // namespace torchspan::checkpoint
