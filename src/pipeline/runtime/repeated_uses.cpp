#include "pipeline/runtime/repeated_uses.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

namespace torchspan::pipeline {

/// Passes gradients on to the graph that is linked before the backward.
class RepeatedUses::GraphNode final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override { return "torchspan::pipeline::Repeated"; }
  /// One edge for each input. Not set_next_edges(), which refuses a node that others lead to: it keeps numbers with
  /// which LibTorch skips nodes in passes that compute only some gradients, and these passes compute all.
  void link(torch::autograd::edge_list edges) { next_edges_ = std::move(edges); }
};

namespace {

/// Visits the tensors of an output that can have gradients, always in the same order.
template <class Visit>
void visit_differentiable(UseOutput& output, const Visit& visit) {
  const auto can_have_gradient = [](const at::Tensor& tensor) {
    return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
  };
  for (c10::IValue& member : output.batch.members) {
    if (!member.isTensor() || !can_have_gradient(member.toTensor())) continue;
    at::Tensor tensor = member.toTensor();
    visit(tensor);
    member = std::move(tensor);
  }
  for (auto& [name, tensor] : output.stashed) {
    if (can_have_gradient(tensor)) visit(tensor);
  }
}

template <class Visit>
void visit_input(const UseInput& input, const Visit& visit) {
  for (const c10::IValue& member : input.batch.members) {
    if (is_defined_tensor(member)) visit(member.toTensor());
  }
  for (const auto& [name, tensor] : input.pops) {
    if (tensor.defined()) visit(tensor);
  }
}

}  // namespace

bool RepeatedUses::selects(int order) const {
  const std::vector<int>& layers = local_.options.checkpoint_layers;
  const int layer = local_.uses[static_cast<std::size_t>(order)].layer;
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

UseOutput RepeatedUses::run(const LayerRunner& runner, int order, UseInput input) {
  Kept kept;
  bool learns = runner.layer_learns(order);
  visit_input(input, [&](const at::Tensor& tensor) {
    learns = learns || tensor.requires_grad();
    kept.watch.add(tensor);
  });
  // A graph may begin at the user's own tensors: recording it finds them.
  if (!learns) return runner.run_use(order, input, false);
  kept.order = order;
  kept.input = std::move(input);
  if (!local_.options.seed) kept.random = RandomState::capture();
  UseOutput output;
  {
    const torch::autograd::AutoGradMode mode(false);
    output = runner.run_use(order, kept.input, false);
  }
  check_unchanged(runner, kept, "forward");
  kept.node = engine::make_node<GraphNode>();
  visit_differentiable(output, [&](at::Tensor& tensor) {
    tensor = tensor.detach();
    torch::autograd::create_gradient_edge(tensor, kept.node);
  });
  uses_.push_back(std::move(kept));
  return output;
}

void RepeatedUses::repeat(const LayerRunner& runner) {
  for (Kept& kept : uses_) {
    check_unchanged(runner, kept, "repeated forward");
    if (kept.random) kept.random->restore();
    UseOutput output = runner.run_use(kept.order, kept.input, true);
    torch::autograd::edge_list edges;
    visit_differentiable(output, [&](at::Tensor& tensor) {
      edges.push_back(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                             : torch::autograd::Edge());
    });
    if (edges.size() != kept.node->num_inputs()) {
      runner.fail_use(
          kept.order, "repeated forward",
          "the repeated forward of a checkpointed layer returned other tensors than the forward: it "
          "must compute the same, or be left out of PipelineOptions::checkpoint_layers");
    }
    static_cast<GraphNode*>(kept.node.get())->link(std::move(edges));
    kept = Kept();
  }
  uses_.clear();
}

void RepeatedUses::check_unchanged(const LayerRunner& runner, const Kept& kept, const char* phase) const {
  if (!kept.watch.changed()) return;
  runner.fail_use(
      kept.order, phase,
      "the input of this checkpointed layer was changed in place, by it or by a later layer, so its "
      "forward cannot be recomputed: make the operation out of place, or leave the layer out of "
      "PipelineOptions::checkpoint_layers");
}

}  // namespace torchspan::pipeline
