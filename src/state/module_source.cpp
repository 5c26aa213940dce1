#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/state/source.h>

#include "state/api/module_tensors.h"

namespace torchspan::state {
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

}  // namespace

SourcePtr module_source(std::shared_ptr<torch::nn::Module> module) {
  return std::make_unique<ModuleSource>(std::move(module));
}

SourcePtr module_source(torch::nn::Module& module) {
  return module_source(std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &module));
}

}  // namespace torchspan::state
