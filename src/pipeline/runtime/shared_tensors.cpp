#include "pipeline/runtime/shared_tensors.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>

#include <torch/nn/module.h>

namespace torchspan::pipeline {
namespace {

/// One tensor of a layer on the worker that built it, as a line of a report.
struct Held {
  std::int64_t id = 0;
  bool learns = false;
  bool tied = false;  ///< by Layers::tie(): the copies may differ between steps
  std::string name;   ///< in its layer
  std::string owner;  ///< "layer 'Linear' (order 3, stage 1 on 'worker1')"

  std::string line() const {
    return fmt::format("{}\t{}\t{}\t{}\n", id, tied ? 2 : learns ? 1 : 0, name, owner);
  }
};

std::vector<Held> parse(const std::string& report) {
  std::vector<Held> all;
  for (std::size_t begin = 0; begin < report.size();) {
    const std::size_t first = report.find('\t', begin), second = report.find('\t', first + 1);
    const std::size_t third = report.find('\t', second + 1), end = report.find('\n', third + 1);
    Held held;
    std::from_chars(report.data() + begin, report.data() + first, held.id);
    held.learns = report[first + 1] == '1';
    held.tied = report[first + 1] == '2';
    held.name = report.substr(second + 1, third - second - 1);
    held.owner = report.substr(third + 1, end - third - 1);
    all.push_back(std::move(held));
    begin = end + 1;
  }
  return all;
}

std::string text_of(const std::vector<Held>& holders) {
  std::vector<std::string> texts;
  for (const Held& held : holders) texts.push_back(fmt::format("'{}' of {}", held.name, held.owner));
  return fmt::format("{}", fmt::join(texts, " and "));
}

bool is_tied(const LocalPipeline& local, std::size_t layer, const std::string& name) {
  for (const auto& tie : local.declared_ties) {
    for (const TiedParameter& parameter : tie) {
      if (static_cast<std::size_t>(parameter.layer) == layer && parameter.name == name) return true;
    }
  }
  return false;
}

int first_order(const Plan& plan, int layer) {
  int order = 0;
  while (plan.invocations[static_cast<std::size_t>(order)].layer != layer) ++order;
  return order;
}

}  // namespace

SharedTensors::Extent SharedTensors::extent_of(const at::Tensor& tensor) {
  Extent extent;
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return extent;
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto bytes = static_cast<std::int64_t>(tensor.element_size());
  extent.storage = tensor.storage().unsafeGetStorageImpl();
  extent.begin = tensor.storage_offset() * bytes;
  extent.end = extent.begin + (last + 1) * bytes;
  return extent;
}

const SharedTensors::Extent* SharedTensors::find(const Extent& extent) const {
  if (extent.storage == nullptr) return nullptr;
  for (const Extent& known : extents_) {
    if (known.storage == extent.storage && known.begin < extent.end && extent.begin < known.end)
      return &known;
  }
  return nullptr;
}

SharedTensors::SharedTensors(const Layers& layers) {
  for (std::size_t layer = 0; layer < layers.specs().size(); ++layer) {
    if (!layers.specs()[layer].existing) continue;
    std::int64_t place = 0;
    for (const at::Tensor& tensor : layers.specs()[layer].existing()) {
      Extent extent = extent_of(tensor);
      extent.layer = static_cast<int>(layer);
      extent.id = static_cast<std::int64_t>(layer) << 32 | place++;
      if (const Extent* known = find(extent)) {
        extent.id = known->id;
        if (known->layer != extent.layer) shared_.insert(extent.id);
      }
      if (extent.storage != nullptr) extents_.push_back(extent);
    }
  }
}

std::string SharedTensors::report(const LocalPipeline& local) const {
  std::string text;
  if (shared_.empty()) return text;
  for (std::size_t layer = 0; layer < local.layers.size(); ++layer) {
    const auto& module = local.layers[layer].module;
    if (!module) continue;
    const std::string owner = local.plan.describe(first_order(local.plan, static_cast<int>(layer)));
    std::set<std::int64_t> reported;
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      const Extent* known = find(extent_of(tensor));
      if (known == nullptr || !shared_.contains(known->id) || !reported.insert(known->id).second) return;
      text += Held{known->id, tensor.requires_grad(), is_tied(local, layer, name), name, owner}.line();
    };
    for (const auto& parameter : module->named_parameters()) add(parameter.key(), parameter.value());
    for (const auto& buffer : module->named_buffers()) add(buffer.key(), buffer.value());
  }
  return text;
}

std::vector<SharedConstant> check_shared_tensors(const LocalPipeline& local,
                                                 const std::vector<std::string>& reports) {
  std::map<std::int64_t, std::vector<Held>> holders;
  std::map<std::int64_t, std::set<std::size_t>> workers;
  for (std::size_t worker = 0; worker < reports.size(); ++worker) {
    for (Held& held : parse(reports[worker])) {
      workers[held.id].insert(worker);
      holders[held.id].push_back(std::move(held));
    }
  }
  std::vector<std::string> untied;
  std::map<std::string, std::string> constant;  // name and owner -> all holders
  for (const auto& [id, all] : holders) {
    if (workers[id].size() < 2) continue;
    const bool tied = std::all_of(all.begin(), all.end(), [](const Held& held) { return held.tied; });
    if (tied) continue;
    bool learns = false;
    for (const Held& held : all) learns = learns || held.learns || held.tied;
    if (learns) untied.push_back(text_of(all));
    for (const Held& held : all) constant.emplace(held.owner + '\t' + held.name, text_of(all));
  }
  if (!untied.empty()) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("layers of pipeline '{}' on different workers share a parameter: {}. Each worker "
                    "would train its own copy: tie all of them (Layers::tie), give these stages one owner "
                    "(PipelineOptions::workers), or make them uses of one layer: "
                    "Layers::reuse(first, \"name\", &Class::method)",
                    local.options.name, fmt::join(untied, "; ")));
  }
  std::vector<SharedConstant> mine;
  for (std::size_t layer = 0; layer < local.layers.size() && !constant.empty(); ++layer) {
    const auto& module = local.layers[layer].module;
    if (!module) continue;
    const std::string owner = local.plan.describe(first_order(local.plan, static_cast<int>(layer)));
    const auto keep = [&](const std::string& name, const at::Tensor& tensor) {
      const auto found = constant.find(owner + '\t' + name);
      if (found != constant.end() && !tensor.is_inference()) mine.push_back({tensor, found->second});
    };
    for (const auto& parameter : module->named_parameters()) keep(parameter.key(), parameter.value());
    for (const auto& buffer : module->named_buffers()) keep(buffer.key(), buffer.value());
  }
  return mine;
}

}  // namespace torchspan::pipeline
