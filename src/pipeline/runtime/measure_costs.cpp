#include <algorithm>
#include <memory>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>

#include <torchspan/detail/device/streams.h>
#include <torchspan/pipeline.h>
#include <torchspan/pipeline/deferred_batch_norm.h>

#include "core/api/throw_invalid.h"
#include "pipeline/layers/micro_batches.h"
#include "pipeline/layers/random.h"
#include "pipeline/plan/measuring.h"
#include "pipeline/runtime/handshake.h"
#include "pipeline/runtime/layer_range_pass.h"

namespace torchspan::pipeline {
namespace {

/// One micro-batch through all layer ranges of a plan in this process, and what each of them costs.
class CostMeasurement {
 public:
  CostMeasurement(const LocalPipeline& local, const CostSample& sample)
      : local_(local), sample_(sample), costs_(local.plan.layer_ranges.size()) {
    const RunMode mode{.gradients = true,
                       .recompute = local.options.checkpoint != ActivationCheckpoint::kNever};
    for (int range = 0; range < ranges(); ++range)
      passes_.push_back(std::make_unique<LayerRangePass>(local, range, 0, mode));
  }

  std::vector<schedule::Costs> run() {
    deliver(kOutside, input());
    for (int range = 0; range < ranges(); ++range) run_forward(range);
    // What a range hands on inside a worker, the next one may keep.
    for (int range = 0; range < ranges(); ++range) costs(range).activation = alive(range);
    for (int range = ranges(); range-- > 0;) run_backward(range);
    return std::move(costs_);
  }

 private:
  int ranges() const { return static_cast<int>(local_.plan.layer_ranges.size()); }
  schedule::Costs& costs(int range) { return costs_[static_cast<std::size_t>(range)]; }
  LayerRangePass& pass(int range) { return *passes_[static_cast<std::size_t>(range)]; }
  double alive(int range) const { return static_cast<double>(watch_.alive(range)); }
  int worker_of(int range) const { return local_.plan.layer_ranges[static_cast<std::size_t>(range)].worker; }

  /// The time when the devices of the layers have done their work.
  TimePoint now() const {
    for (const BuiltLayer& layer : local_.layers) {
      if (!layer.module || !device::has_streams()) continue;
      for (const at::Tensor& parameter : layer.module->parameters()) {
        if (device::has_streams(parameter.device())) device::current_stream(parameter.device()).synchronize();
      }
    }
    return local_.executor().now();
  }

  Activation input() const { return {sample_.input, std::vector<std::uint8_t>(sample_.input.size(), 0)}; }

  /// What arrives from another worker is in memory of the receiver.
  at::Tensor arrived(at::Tensor tensor, int from, int to) {
    if (!tensor.defined() || worker_of(from) == worker_of(to)) return tensor;
    watch_.begin(to);
    return tensor.detach().clone();
  }

  void deliver(int link, Activation activation) {
    if (link == kOutside) return pass(0).put_input(link, std::move(activation));
    const Link& hop = local_.plan.links[static_cast<std::size_t>(link)];
    for (c10::IValue& member : activation.members) {
      if (is_defined_tensor(member)) member = arrived(member.toTensor(), hop.from, hop.to);
    }
    pass(hop.to).put_input(link, std::move(activation));
  }

  void run_forward(int range) {
    std::optional<MicroBatchLoss> loss;
    if (range == ranges() - 1) loss = MicroBatchLoss{&sample_.loss, sample_.target, 1};
    watch_.begin(range);
    const TimePoint start = now();
    std::map<int, Activation> outputs = pass(range).forward(std::move(loss));
    costs(range).forward = now() - start;
    for (auto& [link, activation] : outputs) {
      if (link != kOutside) deliver(link, std::move(activation));
    }
  }

  /// A range whose inputs need no gradients runs its whole backward as weight gradient.
  void run_backward(int range) {
    const bool splits = pass(range).any_input_wants();
    if (!splits) costs(range).weight_input = alive(range);
    watch_.begin(range);
    const double before = alive(range);
    const TimePoint start = now();
    if (pass(range).can_recompute()) {
      pass(range).recompute();
      costs(range).recomputation = std::max(0.0, alive(range) - before);
    }
    auto back = pass(range).backward_inputs();
    const TimePoint middle = now();
    for (auto& [link, gradients] : back) {
      if (link == kOutside) continue;
      const Link& hop = local_.plan.links[static_cast<std::size_t>(link)];
      for (at::Tensor& gradient : gradients) gradient = arrived(std::move(gradient), hop.to, hop.from);
      pass(hop.from).put_gradients(link, std::move(gradients));
    }
    back.clear();
    if (splits) costs(range).weight_input = alive(range);
    watch_.begin(range);
    const TimePoint resumed = now();
    pass(range).backward_weights();
    const TimePoint end = now();
    passes_[static_cast<std::size_t>(range)].reset();
    costs(range).input_gradient = splits ? middle - start : Duration::zero();
    costs(range).weight_gradient = end - resumed + (splits ? Duration::zero() : middle - start);
  }

  const LocalPipeline& local_;
  const CostSample& sample_;
  std::vector<schedule::Costs> costs_;
  AllocationWatch watch_;
  std::vector<std::unique_ptr<LayerRangePass>> passes_;
};

/// Frees the statistics that layers gather in a step.
class NoStatistics {
 public:
  explicit NoStatistics(const std::vector<BuiltLayer>& layers) : layers_(layers) {}
  ~NoStatistics() {
    for (const BuiltLayer& layer : layers_) {
      if (!layer.module) continue;
      for (const auto& module : layer.module->modules()) {
        if (auto* statistics = dynamic_cast<StepStatistics*>(module.get())) statistics->end_step(false);
      }
    }
  }
  NoStatistics(const NoStatistics&) = delete;
  NoStatistics& operator=(const NoStatistics&) = delete;

 private:
  const std::vector<BuiltLayer>& layers_;
};

/// Gradients exist in every step but the first, so that the time of a backward includes their sums.
void make_gradients(const std::vector<BuiltLayer>& layers) {
  for (const BuiltLayer& layer : layers) {
    if (!layer.module) continue;
    for (const at::Tensor& parameter : layer.module->parameters()) {
      if (parameter.requires_grad()) parameter.mutable_grad() = at::zeros_like(parameter.detach());
    }
  }
}

}  // namespace

std::vector<schedule::Costs> measure_costs(const Worker& worker, const Layers& layers,
                                           const PipelineOptions& options, const CostSample& sample) {
  if (sample.repeats < 1) throw_invalid("CostSample::repeats is {}; it must be 1 or more", sample.repeats);
  if (!sample.loss) throw_invalid("CostSample::loss is empty; pass the loss of train_step()");
  LocalPipeline local = make_unconnected(worker, layers, options);
  const RandomScope random;
  for (std::size_t layer = 0; layer < layers.specs().size(); ++layer)
    local.layers[layer] = layers.specs()[layer].build();
  const KeptState kept(local.layers);
  make_gradients(local.layers);
  std::vector<schedule::Costs> best;
  for (int repeat = 0; repeat < sample.repeats; ++repeat) {
    const NoStatistics discarded(local.layers);
    std::vector<schedule::Costs> costs;
    try {
      costs = CostMeasurement(local, sample).run();
    } catch (...) {
      throw_invalid("measure_costs() failed with its sample: {}", describe(std::current_exception()).text);
    }
    for (std::size_t range = 0; range < best.size(); ++range) {
      costs[range].forward = std::min(costs[range].forward, best[range].forward);
      costs[range].input_gradient = std::min(costs[range].input_gradient, best[range].input_gradient);
      costs[range].weight_gradient = std::min(costs[range].weight_gradient, best[range].weight_gradient);
    }
    best = std::move(costs);
  }
  return best;
}

}  // namespace torchspan::pipeline
