#include "pipeline/runtime/layer_runner.h"

#include <algorithm>
#include <fmt/format.h>

#include <torch/nn/module.h>

#include <torchspan/pipeline/deferred_batch_norm.h>

#include "pipeline/runtime/repeated_uses.h"

namespace torchspan::pipeline {

void LayerRunner::fail(const std::string& where, const char* phase) const {
  const ExceptionDescription description = describe(std::current_exception());
  throw Error(ErrorKind::kRemoteFailure,
              fmt::format("step {} of pipeline '{}' failed in the {} of micro-batch {} through {}: {}",
                          mode_.step, local_.options.name, phase, micro_batch_, where, description.text))
      .with_worker(local_.worker.name())
      .with_frame({local_.worker.name(), where, description.type, description.text});
}

void LayerRunner::fail_range(const char* phase) const {
  std::string name = local_.plan.describe(range().first);
  if (range().last != range().first) name += " to " + local_.plan.describe(range().last);
  fail(name, phase);
}

void LayerRunner::fail_use(int order, const char* phase, const char* text) const {
  try {
    throw Error(ErrorKind::kInvalid, text);
  } catch (...) {
    fail(local_.plan.describe(order), phase);
  }
}

/// The random numbers of one use; the loss has the order after the last use. Micro-batches are counted over all
/// replicas.
SeededScope LayerRunner::seeded_scope(int order) const {
  const auto& seed = local_.options.seed;
  const int micro_batch = local_.grid.mine * local_.options.micro_batches + micro_batch_;
  return SeededScope(seed ? std::optional(seed_of_use(*seed, mode_.random_step, order, micro_batch))
                          : std::nullopt);
}

UseOutput LayerRunner::run_use(int order, const UseInput& input, bool repeated) const {
  const LayerUse& use = local_.uses[static_cast<std::size_t>(order)];
  const BuiltLayer& layer = local_.layers[static_cast<std::size_t>(use.layer)];
  try {
    if (layer.module) {
      for (const auto& module : layer.module->modules()) {
        if (auto* statistics = dynamic_cast<StepStatistics*>(module.get()))
          statistics->begin_use(order, repeated);
      }
    }
    Skips skips(input.pops, use.stashes);
    LayerCache cache;
    if (mode_.cache != nullptr) cache = LayerCache((*mode_.cache)[{order, micro_batch_}]);
    UseOutput output;
    {
      const SeededScope random = seeded_scope(order);
      output.batch = use.call(layer.object.get(), input.batch, {skips, cache});
    }
    if (const std::string unused_keys = skips.unused_keys(); !unused_keys.empty()) {
      throw Error(ErrorKind::kInvalid, "skips: " + unused_keys);
    }
    output.stashed = std::move(skips.stashed());
    return output;
  } catch (...) {
    fail(local_.plan.describe(order), repeated ? "repeated forward" : "forward");
  }
}

at::Tensor LayerRunner::run_loss(const MicroBatchLoss& loss, const Batch& output, bool repeated) const {
  try {
    const SeededScope random = seeded_scope(static_cast<int>(local_.plan.invocations.size()));
    at::Tensor value = (*loss.loss)(output, loss.target);
    if (!value.defined() || value.numel() != 1) {
      throw Error(ErrorKind::kInvalid,
                  "the loss must be a tensor of one element, the mean over the micro-batch");
    }
    return value;
  } catch (...) {
    fail("the loss", repeated ? "repeated forward" : "forward");
  }
}

LayerRangeOutputs LayerRunner::run(const std::map<int, Activation>& inputs,
                                   const std::optional<MicroBatchLoss>& loss, bool repeated,
                                   RepeatedUses* selected) const {
  const Plan& plan = local_.plan;
  LayerRangeOutputs outputs;
  std::map<std::pair<int, std::string>, at::Tensor> aside;  // by the order that pops it, and the name
  for (const auto& [link, activation] : inputs) {
    if (link == kOutside || plan.links[static_cast<std::size_t>(link)].skip.empty()) continue;
    const Link& skip = plan.links[static_cast<std::size_t>(link)];
    aside[{skip.popped_by, skip.skip}] = Member<at::Tensor>::to(activation.batch.members.at(0));
  }
  Batch batch = inputs.at(range_ == 0 ? kOutside : range_ - 1).batch;
  for (int order = range().first; order <= range().last; ++order) {
    UseInput input{std::move(batch), {}};
    for (const std::string& name : local_.uses[static_cast<std::size_t>(order)].pops) {
      input.pops.emplace(name, std::move(aside[{order, name}]));
    }
    UseOutput output = selected != nullptr && selected->selects(order)
                           ? selected->run(*this, order, std::move(input))
                           : run_use(order, input, repeated);
    batch = std::move(output.batch);
    std::map<std::string, at::Tensor>& stashed = output.stashed;
    for (const LocalSkip& skip : plan.local_skips) {
      if (skip.stashed_by == order) aside[{skip.popped_by, skip.name}] = stashed.at(skip.name);
    }
    for (std::size_t link = 0; link < plan.links.size(); ++link) {
      const Link& skip = plan.links[link];
      if (skip.skip.empty() || skip.stashed_by != order || skip.from != range_) continue;
      outputs.batches[static_cast<int>(link)].members = {Member<at::Tensor>::from(stashed.at(skip.skip))};
    }
  }
  if (loss) outputs.loss = run_loss(*loss, batch, repeated);
  outputs.batches[range_ == local_.last_layer_range() ? kOutside : range_] = std::move(batch);
  return outputs;
}

bool LayerRunner::any_layer_learns() const {
  for (int order = range().first; order <= range().last; ++order) {
    if (layer_learns(order)) return true;
  }
  return false;
}

bool LayerRunner::layer_learns(int order) const {
  const LayerUse& use = local_.uses[static_cast<std::size_t>(order)];
  const auto& module = local_.layers[static_cast<std::size_t>(use.layer)].module;
  if (!module) return false;
  const std::vector<at::Tensor> parameters = module->parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const at::Tensor& parameter) { return parameter.requires_grad(); });
}

}  // namespace torchspan::pipeline
