#include "pipeline/runtime/layer_runner.h"

#include <fmt/format.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <torchspan/pipeline/deferred_batch_norm.h>

#include "pipeline/layers/micro_batches.h"

namespace torchspan::pipeline {
namespace {

/// Passes gradients on to the graph that is linked before the backward.
class KeptUseNode final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override { return "torchspan::pipeline::Repeated"; }
  /// One edge for each input. Not set_next_edges(), which refuses a node that others lead to: it keeps numbers with
  /// which LibTorch skips nodes in passes that compute only some gradients, and these passes compute all.
  void link(torch::autograd::edge_list edges) { next_edges_ = std::move(edges); }
};

}  // namespace

LayerRangeOutputs LayerRunner::run(const std::map<int, Activation>& inputs,
                                   const std::optional<MicroBatchLoss>& loss, bool repeated) {
  const Plan& plan = local_.plan;
  LayerRangeOutputs outputs;
  std::map<std::pair<int, std::string>, at::Tensor> aside;  // by the order that pops it, and the name
  for (const auto& [link, activation] : inputs) {
    if (link == kOutside || plan.links[static_cast<std::size_t>(link)].skip.empty()) continue;
    const Link& skip = plan.links[static_cast<std::size_t>(link)];
    aside[{skip.popped_by, skip.skip}] = Member<at::Tensor>::to(activation.members.at(0));
  }
  Batch batch = inputs.at(range_ == 0 ? kOutside : range_ - 1);
  for (int order = range().first; order <= range().last; ++order) {
    UseData input{std::move(batch), {}};
    for (const std::string& name : local_.uses[static_cast<std::size_t>(order)].pops) {
      input.skips.emplace(name, std::move(aside[{order, name}]));
    }
    UseData output = !repeated && keeps_input(order) ? run_and_keep(order, std::move(input))
                                                     : run_use(order, input, repeated);
    batch = std::move(output.batch);
    std::map<std::string, at::Tensor>& stashed = output.skips;
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

LayerRunner::UseData LayerRunner::run_use(int order, const UseData& input, bool repeated) const {
  const LayerUse& use = local_.uses[static_cast<std::size_t>(order)];
  const BuiltLayer& layer = local_.layers[static_cast<std::size_t>(use.layer)];
  try {
    if (layer.module) {
      for (const auto& module : layer.module->modules()) {
        if (auto* statistics = dynamic_cast<StepStatistics*>(module.get()))
          statistics->begin_use(order, repeated);
      }
    }
    Skips skips(input.skips, use.stashes);
    LayerCache cache;
    if (mode_.cache != nullptr) cache = LayerCache((*mode_.cache)[{order, micro_batch_}]);
    UseData output;
    {
      const SeededScope random = seeded_scope(order);
      output.batch = use.call(layer.object.get(), input.batch, {skips, cache, repeated});
    }
    if (const std::string unused_keys = skips.unused_keys(); !unused_keys.empty()) {
      throw_invalid("skips: " + unused_keys);
    }
    output.skips = std::move(skips.stashed());
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
      throw_invalid("the loss must be a tensor of one element, the mean over the micro-batch");
    }
    return value;
  } catch (...) {
    fail("the loss", repeated ? "repeated forward" : "forward");
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

bool LayerRunner::any_layer_learns() const {
  for (int order = range().first; order <= range().last; ++order) {
    if (layer_learns(order)) return true;
  }
  return false;
}

/// Whether any parameter of the layer of one use requires a gradient.
bool LayerRunner::layer_learns(int order) const {
  const LayerUse& use = local_.uses[static_cast<std::size_t>(order)];
  const auto& module = local_.layers[static_cast<std::size_t>(use.layer)].module;
  if (!module) return false;
  const std::vector<at::Tensor> parameters = module->parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const at::Tensor& parameter) { return parameter.requires_grad(); });
}

bool LayerRunner::keeps_input(int order) const {
  if (!mode_.recompute || !mode_.gradients) return false;
  const std::vector<int>& layers = local_.options.checkpoint_layers;
  const int layer = local_.uses[static_cast<std::size_t>(order)].layer;
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

/// Visits the tensors of an output that can have gradients, always in the same order.
template <class Visit>
void LayerRunner::visit_differentiable(UseData& output, const Visit& visit) {
  const auto can_have_gradient = [](const at::Tensor& tensor) {
    return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
  };
  for (c10::IValue& member : output.batch.members) {
    if (!member.isTensor() || !can_have_gradient(member.toTensor())) continue;
    at::Tensor tensor = member.toTensor();
    visit(tensor);
    member = std::move(tensor);
  }
  for (auto& [name, tensor] : output.skips) {
    if (can_have_gradient(tensor)) visit(tensor);
  }
}

LayerRunner::UseData LayerRunner::run_and_keep(int order, UseData input) {
  Kept kept;
  bool learns = layer_learns(order);
  const auto add = [&](const at::Tensor& tensor) {
    learns = learns || tensor.requires_grad();
    kept.watch.add(tensor);
  };
  for (const c10::IValue& member : input.batch.members) {
    if (is_defined_tensor(member)) add(member.toTensor());
  }
  for (const auto& [name, tensor] : input.skips) {
    if (tensor.defined()) add(tensor);
  }
  // A graph may begin at the user's own tensors: recording it finds them.
  if (!learns) return run_use(order, input, false);
  kept.order = order;
  kept.input = std::move(input);
  if (!local_.options.seed) kept.random = RandomState::capture();
  UseData output;
  {
    const torch::autograd::AutoGradMode mode(false);
    output = run_use(order, kept.input, false);
  }
  check_unchanged(kept, "forward");
  kept.node = engine::make_node<KeptUseNode>();
  visit_differentiable(output, [&](at::Tensor& tensor) {
    tensor = tensor.detach();
    torch::autograd::create_gradient_edge(tensor, kept.node);
  });
  kept_.push_back(std::move(kept));
  return output;
}

void LayerRunner::repeat_kept() {
  for (Kept& kept : kept_) {
    check_unchanged(kept, "repeated forward");
    if (kept.random) kept.random->restore();
    UseData output = run_use(kept.order, kept.input, true);
    torch::autograd::edge_list edges;
    visit_differentiable(output, [&](at::Tensor& tensor) {
      edges.push_back(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                             : torch::autograd::Edge());
    });
    if (edges.size() != kept.node->num_inputs()) {
      fail_use(kept.order, "repeated forward",
               "the repeated forward of a checkpointed layer returned other tensors than the forward: it "
               "must compute the same, or be left out of PipelineOptions::checkpoint_layers");
    }
    static_cast<KeptUseNode*>(kept.node.get())->link(std::move(edges));
    kept = Kept();
  }
  kept_.clear();
}

void LayerRunner::check_unchanged(const Kept& kept, const char* phase) const {
  if (!kept.watch.changed()) return;
  fail_use(kept.order, phase,
           "the input of this checkpointed layer was changed in place, by it or by a later layer, so its "
           "forward cannot be recomputed: make the operation out of place, or leave the layer out of "
           "PipelineOptions::checkpoint_layers");
}

/// Wraps the current exception into an Error that names `where`.
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

/// Throws an Error of the user's, with `text`, that names one use.
void LayerRunner::fail_use(int order, const char* phase, const char* text) const {
  try {
    throw_invalid(text);
  } catch (...) {
    fail(local_.plan.describe(order), phase);
  }
}

}  // namespace torchspan::pipeline
