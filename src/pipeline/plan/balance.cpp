#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <sstream>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <torchspan/pipeline.h>

#include "core/api/throw_invalid.h"
#include "engine/api/node_ptr.h"
#include "pipeline/layers/random.h"
#include "pipeline/plan/measuring.h"
#include "pipeline/runtime/agreement.h"

namespace torchspan::pipeline {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// best[p][i]: the smallest value of the first i items in p parts, where `combine` adds the cost of a part to
/// the value; cut[p][i]: where the last part begins.
struct Cuts {
  std::vector<std::vector<double>> best;
  std::vector<std::vector<int>> cut;
};

template <class Combine>
Cuts find_cuts(const std::vector<double>& sums, int parts, const Combine& combine) {
  const int items = static_cast<int>(sums.size()) - 1;
  const auto size = static_cast<std::size_t>(items) + 1;
  Cuts cuts;
  cuts.best.assign(static_cast<std::size_t>(parts) + 1, std::vector<double>(size, kNever));
  cuts.cut.assign(static_cast<std::size_t>(parts) + 1, std::vector<int>(size, 0));
  cuts.best[0][0] = 0;
  for (int part = 1; part <= parts; ++part) {
    const auto p = static_cast<std::size_t>(part);
    for (int end = part; end <= items; ++end) {
      const auto e = static_cast<std::size_t>(end);
      for (int begin = part - 1; begin < end; ++begin) {
        const auto b = static_cast<std::size_t>(begin);
        const double value = combine(cuts.best[p - 1][b], sums[e] - sums[b]);
        if (value < cuts.best[p][e]) {
          cuts.best[p][e] = value;
          cuts.cut[p][e] = begin;
        }
      }
    }
  }
  return cuts;
}

/// The data that passes from layer to layer while they run in order.
struct Probe {
  Batch batch;
  std::map<std::pair<std::string, std::string>, at::Tensor> stashed = {};
  bool linked = false;  ///< one graph of all layers, and not one of each
};

double tensor_bytes(const Batch& batch) {
  double bytes = 0;
  for (const c10::IValue& member : batch.members) {
    if (member.isTensor() && member.toTensor().defined())
      bytes += static_cast<double>(member.toTensor().nbytes());
  }
  return bytes;
}

/// Ends a graph: drops the gradients that reach it.
class EndNode final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
  std::string name() const override { return "torchspan::pipeline::End"; }
};

/// `learns`: a graph begins at the tensors. They are not leaves, so a layer may change them in place.
Batch detached(const Batch& batch, bool learns) {
  Batch copy = batch;
  const engine::NodePtr end = engine::make_node<EndNode>();
  for (c10::IValue& member : copy.members) {
    if (!member.isTensor() || !member.toTensor().defined()) continue;
    at::Tensor tensor = member.toTensor().detach();
    if (learns && tensor.is_floating_point()) torch::autograd::create_gradient_edge(tensor, end);
    member = tensor;
  }
  return copy;
}

/// A copy of the sample, which the first layer may change in place.
Batch copy_of(const Batch& sample) {
  Batch copy = sample;
  for (c10::IValue& member : copy.members) {
    if (member.isTensor() && member.toTensor().defined()) member = member.toTensor().clone();
  }
  return copy;
}

/// Runs one use forward on what the use before it returned.
Batch run_forward(const LayerUse& use, const BuiltLayer& layer, bool first, Probe& probe) {
  std::map<std::string, at::Tensor> pops;
  for (const std::string& name : use.pops) pops.emplace(name, probe.stashed[{use.space, name}]);
  Skips skips(std::move(pops), use.stashes);
  const Batch input = probe.linked ? probe.batch : detached(probe.batch, !first);
  Batch output = use.call(layer.object.get(), input, skips);
  for (auto& [name, value] : skips.stashed()) {
    probe.stashed[{use.space, name}] = value.defined() && !probe.linked ? value.detach() : value;
  }
  probe.batch = probe.linked ? output : detached(output, false);
  return output;
}

/// Runs one use forward and backward, and adds its times to `cost`.
void drive(Executor& executor, const LayerUse& use, const BuiltLayer& layer, bool first, Probe& probe,
           LayerCost& cost) {
  const TimePoint begin = executor.now();
  const Batch output = run_forward(use, layer, first, probe);
  const TimePoint middle = executor.now();
  std::vector<at::Tensor> roots, gradients;
  for (const c10::IValue& member : output.members) {
    if (!member.isTensor() || !member.toTensor().defined() || !member.toTensor().requires_grad()) continue;
    roots.push_back(member.toTensor());
    gradients.push_back(at::ones_like(member.toTensor()));
  }
  const TimePoint ready = executor.now();
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
  cost.forward_seconds += to_seconds(middle - begin);
  cost.backward_seconds += to_seconds(executor.now() - ready);
  cost.activation_bytes += tensor_bytes(output);
}

/// Runs all uses forward, and counts by layer what their graphs then keep. A later layer may keep what an earlier one
/// computed.
void measure_kept_bytes(const Layers& layers, const std::vector<BuiltLayer>& built, const Batch& sample,
                        std::vector<LayerCost>& costs) {
  AllocationWatch watch;
  torch::autograd::edge_list graphs;
  {
    Probe probe{.batch = sample, .linked = true};
    for (const LayerUse& use : layers.uses()) {
      watch.begin(use.layer);
      const bool first = &use == &layers.uses().front();
      const Batch output = run_forward(use, built[static_cast<std::size_t>(use.layer)], first, probe);
      for (const c10::IValue& member : output.members) {
        if (member.isTensor() && member.toTensor().defined() && member.toTensor().requires_grad())
          graphs.push_back(torch::autograd::impl::gradient_edge(member.toTensor()));
      }
    }
  }
  for (std::size_t layer = 0; layer < costs.size(); ++layer)
    costs[layer].kept_bytes = static_cast<double>(watch.alive(static_cast<int>(layer)));
}

std::vector<double> costs_of(const std::vector<LayerCost>& layers,
                             const std::function<double(const LayerCost&)>& cost) {
  std::vector<double> costs;
  for (const LayerCost& layer : layers) costs.push_back(cost(layer));
  return costs;
}

/// Runs `measure` on the first worker and returns its result on all: two measurements differ.
std::vector<double> measure_once(const Worker& worker, std::vector<std::string> workers,
                                 const std::function<std::vector<double>()>& measure) {
  if (workers.empty()) {
    for (const WorkerInfo& each : worker.workers()) workers.push_back(each.name);
  }
  const auto texts = all_or_none(worker, workers, ErrorKind::kInvalid, [&] {
    return worker.name() == workers.front() ? fmt::format("{}", fmt::join(measure(), " ")) : std::string();
  });
  std::istringstream words(texts.front());
  std::vector<double> costs;
  for (double cost = 0; words >> cost;) costs.push_back(cost);
  return costs;
}

}  // namespace

std::vector<int> balance_costs(const std::vector<double>& costs, int parts) {
  if (parts < 1) throw_invalid("parts is {}; it must be 1 or more", parts);
  if (costs.size() < static_cast<std::size_t>(parts)) {
    throw_invalid("{} layers do not fill {} stages: every stage needs a layer", costs.size(), parts);
  }
  std::vector<double> sums{0};
  for (std::size_t i = 0; i < costs.size(); ++i) {
    if (!(costs[i] >= 0) || !std::isfinite(costs[i])) {
      throw_invalid("the cost of layer {} is {}; it must be finite, 0 or more", i, costs[i]);
    }
    sums.push_back(sums.back() + costs[i]);
  }
  const auto largest = [](double before, double part) { return std::max(before, part); };
  const double bottleneck = find_cuts(sums, parts, largest).best.back().back() * (1 + 1e-12);
  const Cuts even = find_cuts(sums, parts, [bottleneck](double before, double part) {
    return part > bottleneck ? kNever : before + part * part;
  });
  std::vector<int> balance(static_cast<std::size_t>(parts));
  std::size_t end = costs.size();
  for (std::size_t part = static_cast<std::size_t>(parts); part > 0; --part) {
    const auto begin = static_cast<std::size_t>(even.cut[part][end]);
    balance[part - 1] = static_cast<int>(end - begin);
    end = begin;
  }
  return balance;
}

std::vector<LayerCost> profile(Executor& executor, const Layers& layers, const Batch& sample,
                               const ProfileOptions& options) {
  if (options.repeats < 1) throw_invalid("ProfileOptions::repeats must be 1 or more");
  const RandomScope random;
  std::vector<BuiltLayer> built;
  for (const LayerSpec& spec : layers.specs()) built.push_back(spec.build());
  const KeptState kept(built);
  const torch::autograd::AutoGradMode mode(true);
  std::vector<LayerCost> best(built.size());
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    Probe probe{.batch = copy_of(sample)};
    std::vector<LayerCost> costs(built.size());
    bool first = true;
    for (const LayerUse& use : layers.uses()) {
      const auto layer = static_cast<std::size_t>(use.layer);
      try {
        drive(executor, use, built[layer], std::exchange(first, false), probe, costs[layer]);
      } catch (...) {
        throw_invalid("layer '{}' failed with the sample: {}", layers.specs()[layer].name,
                      describe(std::current_exception()).text);
      }
    }
    for (std::size_t layer = 0; layer < built.size(); ++layer) {
      if (repeat == 0) best[layer] = costs[layer];
      best[layer].forward_seconds = std::min(best[layer].forward_seconds, costs[layer].forward_seconds);
      best[layer].backward_seconds = std::min(best[layer].backward_seconds, costs[layer].backward_seconds);
    }
  }
  measure_kept_bytes(layers, built, copy_of(sample), best);
  for (std::size_t layer = 0; layer < built.size(); ++layer) {
    if (!built[layer].module) continue;
    for (const at::Tensor& parameter : built[layer].module->parameters()) {
      best[layer].parameter_bytes += static_cast<double>(parameter.nbytes());
    }
  }
  return best;
}

std::vector<int> balance_by_time(const Worker& worker, const Layers& layers, int stages, const Batch& sample,
                                 const ProfileOptions& options) {
  const auto measure = [&] {
    return costs_of(profile(worker.runtime().executor, layers, sample, options),
                    [](const LayerCost& c) { return c.forward_seconds + c.backward_seconds; });
  };
  return balance_costs(measure_once(worker, options.workers, measure), stages);
}

std::vector<int> balance_by_size(const Worker& worker, const Layers& layers, int stages, const Batch& sample,
                                 double parameter_scale, const ProfileOptions& options) {
  const auto measure = [&] {
    return costs_of(
        profile(worker.runtime().executor, layers, sample, {.repeats = 1}),
        [=](const LayerCost& c) { return c.parameter_bytes * parameter_scale + c.activation_bytes; });
  };
  return balance_costs(measure_once(worker, options.workers, measure), stages);
}

}  // namespace torchspan::pipeline
