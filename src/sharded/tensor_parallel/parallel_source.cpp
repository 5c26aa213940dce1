#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/optim/optimizer.h>
#include <torchspan/sharded/tensor_parallel.h>

#include "sharded/state/entry_name.h"

namespace torchspan {
namespace {

/// The parts of parameters in a module, by the parameters' names.
using PartsByName = std::map<std::string, ParameterPart>;

PartsByName parts_of_module(const torch::nn::Module& module) {
  PartsByName parts;
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    const auto* parallel = dynamic_cast<const TensorParallelModule*>(child.value().get());
    if (parallel == nullptr) continue;
    for (ParameterPart& part : parallel->parts())
      parts.emplace(child.key() + "." + part.name, std::move(part));
  }
  if (const auto* parallel = dynamic_cast<const TensorParallelModule*>(&module)) {
    for (ParameterPart& part : parallel->parts()) parts.emplace(part.name, std::move(part));
  }
  return parts;
}

std::vector<std::int64_t> offset_of(const ParameterPart& part) {
  std::vector<std::int64_t> offset(part.shape.size(), 0);
  offset[static_cast<std::size_t>(part.dim)] = part.first;
  return offset;
}

/// Parameters and buffers of a module, some of which are parts of larger ones.
class ParallelSource final : public checkpoint::StateSource {
 public:
  explicit ParallelSource(std::shared_ptr<torch::nn::Module> module)
      : module_(std::move(module)), parts_(parts_of_module(*module_)) {}

  void save(checkpoint::StateWriter& writer) const override {
    for (const auto& [name, tensor] : tensors()) {
      const auto part = parts_.find(name);
      if (part == parts_.end()) {
        writer.add(name, tensor);
      } else {
        writer.add_shard(name, tensor, part->second.shape, offset_of(part->second));
      }
    }
  }

  void load(const checkpoint::StateReader& reader) override {
    const auto all = tensors();
    for (const auto& [name, tensor] : all) {
      const auto part = parts_.find(name);
      // check() compares with the whole tensor; this one has no memory.
      const at::Tensor whole =
          part == parts_.end() ? tensor : at::empty(part->second.shape, tensor.options().device(at::kMeta));
      reader.check(name, whole);
    }
    for (const auto& [name, tensor] : all) {
      const auto part = parts_.find(name);
      if (part == parts_.end()) {
        reader.read_into(name, tensor);
      } else {
        reader.read_shard_into(name, tensor, offset_of(part->second));
      }
    }
  }

 private:
  std::vector<std::pair<std::string, at::Tensor>> tensors() const {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const auto& one : module_->named_parameters()) tensors.emplace_back(one.key(), one.value().detach());
    for (const auto& one : module_->named_buffers()) tensors.emplace_back(one.key(), one.value());
    return tensors;
  }
  const std::shared_ptr<torch::nn::Module> module_;
  const PartsByName parts_;
};

/// The state of an optimizer of such a module. Entries with the shape of a part are parts themselves.
class ParallelOptimizerSource final : public checkpoint::StateSource {
 public:
  ParallelOptimizerSource(optim::Optimizer& optimizer, const torch::nn::Module& module)
      : optimizer_(optimizer) {
    std::unordered_map<const c10::TensorImpl*, ParameterPart> part_of;
    PartsByName parts = parts_of_module(module);
    for (const auto& one : module.named_parameters()) {
      const auto part = parts.find(one.key());
      if (part != parts.end()) part_of.emplace(one.value().unsafeGetTensorImpl(), std::move(part->second));
    }
    for (const auto& [owner, parameter] : sharded::owned_parameters(optimizer)) {
      const auto part = part_of.find(parameter.unsafeGetTensorImpl());
      if (part != part_of.end()) parts_.emplace(owner, Part{part->second, parameter.sizes().vec()});
    }
  }

  void save(checkpoint::StateWriter& writer) const override {
    for (const auto& item : optimizer_.state_view()) {
      const auto part = parts_.find(sharded::EntryName(item.key()).owner);
      if (part != parts_.end() && item.value().sizes() == at::IntArrayRef(part->second.sizes)) {
        writer.add_shard(item.key(), item.value(), part->second.place.shape, offset_of(part->second.place));
      } else {
        writer.add(item.key(), item.value());
      }
    }
  }

  void load(const checkpoint::StateReader& reader) override {
    optim::StateDict state;
    for (const std::string& key : reader.names()) {
      const auto part = parts_.find(sharded::EntryName(key).owner);
      if (part == parts_.end() || reader.shape(key) != part->second.place.shape) {
        state.insert(key, reader.read(key));
        continue;
      }
      const at::Tensor mine = at::empty(part->second.sizes, reader.dtype_of(reader.full_name(key)));
      reader.read_shard_into(key, mine, offset_of(part->second.place));
      state.insert(key, mine);
    }
    optimizer_.load_state_dict(state);
  }

 private:
  struct Part {
    ParameterPart place;
    std::vector<std::int64_t> sizes;  ///< of this rank's parameter
  };

  optim::Optimizer& optimizer_;
  std::map<std::string, Part> parts_;  ///< by EntryName::owner
};

}  // namespace

std::unique_ptr<checkpoint::StateSource> tensor_parallel_source(std::shared_ptr<torch::nn::Module> module) {
  return std::make_unique<ParallelSource>(std::move(module));
}

std::unique_ptr<checkpoint::StateSource> tensor_parallel_optimizer_source(optim::Optimizer& optimizer,
                                                                          const torch::nn::Module& module) {
  return std::make_unique<ParallelOptimizerSource>(optimizer, module);
}

}  // namespace torchspan
