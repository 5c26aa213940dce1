#include "pipeline/runtime/replica_buckets.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include <torch/nn/module.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {
namespace {

/// A bucket closes when it holds as many bytes.
constexpr std::size_t kBucketBytes = std::size_t{16} << 20;

/// A parameter of this worker and the layer ranges that use it.
struct UsedParameter {
  at::Tensor tensor;
  std::set<int> ranges;
  bool tied = false;
};

bool has_tie(const LocalPipeline& local, const at::Tensor& parameter) {
  for (const Tie& tie : local.ties) {
    for (const at::Tensor& copy : tie.copies) {
      if (copy.is_same(parameter)) return true;
    }
  }
  return false;
}

/// Each parameter once, in the order of layers.
std::vector<UsedParameter> used_parameters(const LocalPipeline& local) {
  std::vector<UsedParameter> all;
  std::map<const void*, std::size_t> places;
  for (std::size_t layer = 0; layer < local.layers.size(); ++layer) {
    const auto& module = local.layers[layer].module;
    if (!module) continue;
    std::set<int> ranges;
    for (std::size_t order = 0; order < local.uses.size(); ++order) {
      if (static_cast<std::size_t>(local.uses[order].layer) == layer)
        ranges.insert(local.plan.layer_range_of(static_cast<int>(order)));
    }
    for (const at::Tensor& parameter : module->parameters()) {
      const auto [place, fresh] = places.emplace(parameter.unsafeGetTensorImpl(), all.size());
      if (fresh) all.push_back({parameter, {}, has_tie(local, parameter)});
      all[place->second].ranges.insert(ranges.begin(), ranges.end());
    }
  }
  return all;
}

/// Gives each parameter an owner: the largest first, each to the replica that has the fewest bytes.
std::vector<int> assign_owners(const std::vector<UsedParameter>& parameters, int replicas) {
  std::vector<std::size_t> order(parameters.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return parameters[a].tensor.nbytes() > parameters[b].tensor.nbytes();
  });
  std::vector<std::size_t> load(static_cast<std::size_t>(replicas), 0);
  std::vector<int> owners(parameters.size());
  for (const std::size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += parameters[i].tensor.nbytes();
    owners[i] = static_cast<int>(least - load.begin());
  }
  return owners;
}

}  // namespace

std::vector<ReplicaBucket> make_replica_buckets(const LocalPipeline& local) {
  if (local.grid.count() <= 1) return {};
  struct Open {
    std::size_t bucket = 0;
    std::size_t bytes = 0;
  };
  const std::vector<UsedParameter> parameters = used_parameters(local);
  const std::vector<int> owners = assign_owners(parameters, local.grid.count());
  std::vector<ReplicaBucket> buckets;
  std::map<std::pair<std::vector<int>, int>, Open> open;  // by ranges and owner; tied ones have no ranges
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const UsedParameter& parameter = parameters[i];
    const std::vector<int> ranges(parameter.ranges.begin(), parameter.ranges.end());
    const std::pair key{parameter.tied ? std::vector<int>() : ranges, owners[i]};
    const auto [place, fresh] = open.emplace(key, Open{buckets.size(), 0});
    Open& current = place->second;
    if (fresh || current.bytes >= kBucketBytes) {
      current = {buckets.size(), 0};
      buckets.push_back({key.first, parameter.tied, owners[i], {}});
    }
    buckets[current.bucket].parameters.push_back(parameter.tensor);
    current.bytes += parameter.tensor.nbytes();
  }
  return buckets;
}

}  // namespace torchspan::pipeline
