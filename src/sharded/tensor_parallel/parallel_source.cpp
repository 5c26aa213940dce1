#include <map>
#include <memory>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/sharded/tensor_parallel.h>

namespace torchspan {
namespace {

/// Parameters and buffers of a module, some of which are parts of larger ones.
class ParallelSource final : public checkpoint::StateSource {
 public:
  explicit ParallelSource(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {
    for (const auto& child : module_->named_modules("", /*include_self=*/true)) {
      const auto* parallel = dynamic_cast<const TensorParallelModule*>(child.value().get());
      if (parallel == nullptr) continue;
      for (ParameterPart& part : parallel->parts()) {
        const std::string name = child.key().empty() ? part.name : child.key() + "." + part.name;
        parts_.emplace(name, std::move(part));
      }
    }
  }

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
      // check() compares with the whole tensor; this one takes no memory.
      const at::Tensor whole =
          part == parts_.end() ? tensor : at::empty({}, tensor.options()).expand(part->second.shape);
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
  static std::vector<std::int64_t> offset_of(const ParameterPart& part) {
    std::vector<std::int64_t> offset(part.shape.size(), 0);
    offset[static_cast<std::size_t>(part.dim)] = part.first;
    return offset;
  }
  const std::shared_ptr<torch::nn::Module> module_;
  std::map<std::string, ParameterPart> parts_;
};

}  // namespace

std::unique_ptr<checkpoint::StateSource> tensor_parallel_source(std::shared_ptr<torch::nn::Module> module) {
  return std::make_unique<ParallelSource>(std::move(module));
}

}  // namespace torchspan
