#include "pipeline/runtime/replica_values.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <string_view>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/wire.h>

#include "pipeline/runtime/all_gather_text.h"
#include "pipeline/runtime/value_of_first.h"

namespace torchspan::pipeline {
namespace {

/// Limit for the replicas to compare their tensors.
constexpr Duration kCompareTimeout = std::chrono::minutes(5);
constexpr std::size_t kDigits = 16;

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

NamedTensors tensors_of(const LocalPipeline& local) {
  NamedTensors all;
  for (std::size_t layer = 0; layer < local.layers.size(); ++layer) {
    const auto& module = local.layers[layer].module;
    if (!module) continue;
    const auto add = [&](const auto& items, const char* kind) {
      for (const auto& item : items) {
        if (item.value().defined())
          all.emplace_back(
              fmt::format("{} '{}' of layer {} ('{}')", kind, item.key(), layer, local.plan.layers[layer]),
              item.value());
      }
    };
    add(module->named_parameters(), "parameter");
    add(module->named_buffers(), "buffer");
  }
  return all;
}

std::string form_of_tensor(const std::pair<std::string, at::Tensor>& named) {
  return fmt::format("{}: {} [{}]", named.first, c10::toString(named.second.scalar_type()),
                     fmt::join(named.second.sizes(), ", "));
}

std::uint64_t digest_of_value(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().cpu().contiguous();
  return wire::digest(std::string_view(static_cast<const char*>(plain.data_ptr()), plain.nbytes()));
}

/// The forms and the digests of this worker's tensors: two numbers of 16 digits for each tensor.
std::string describe_tensors(const NamedTensors& tensors) {
  std::string text;
  for (const auto& named : tensors)
    text += fmt::format("{:016x}{:016x}", wire::digest(form_of_tensor(named)), digest_of_value(named.second));
  return text;
}

[[noreturn]] void refuse_difference(const LocalPipeline& local, std::size_t replica,
                                    const std::string& what) {
  throw Error(
      ErrorKind::kInvalid,
      fmt::format("the replicas of pipeline '{}' have different layers: worker '{}' of replica {} and "
                  "worker '{}' of replica 0 differ at {}; build the same layers in all replicas",
                  local.options.name, local.grid.names_of(local.me)[replica], replica,
                  local.grid.names_of(local.me)[0], what));
}

/// The tensors whose values differ in any replica.
std::vector<std::size_t> find_differences(const LocalPipeline& local, const NamedTensors& tensors) {
  const std::vector<std::string> all = all_gather_text(local.worker, describe_tensors(tensors),
                                                       local.grid.names_of(local.me), kCompareTimeout);
  std::vector<std::size_t> different;
  const auto part_of = [](const std::string& text, std::size_t index) {
    return std::string_view(text).substr(std::min(text.size(), index * kDigits), kDigits);
  };
  for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    bool differs = false;
    for (std::size_t replica = 1; replica < all.size(); ++replica) {
      if (part_of(all[replica], 2 * tensor) != part_of(all[0], 2 * tensor))
        refuse_difference(local, replica, form_of_tensor(tensors[tensor]));
      differs = differs || part_of(all[replica], 2 * tensor + 1) != part_of(all[0], 2 * tensor + 1);
    }
    if (differs) different.push_back(tensor);
  }
  for (std::size_t replica = 1; replica < all.size(); ++replica) {
    if (all[replica].size() != all[0].size())
      refuse_difference(local, replica, "the number of parameters and buffers");
  }
  return different;
}

}  // namespace

void copy_from_first_replica(const LocalPipeline& local) {
  const torch::autograd::AutoGradMode no_grad(false);
  const NamedTensors tensors = tensors_of(local);
  for (const std::size_t tensor : find_differences(local, tensors)) {
    const auto& [name, target] = tensors[tensor];
    target.copy_(value_of_first(local.worker, local.grid.names_of(local.me), target, name));
  }
}

}  // namespace torchspan::pipeline
