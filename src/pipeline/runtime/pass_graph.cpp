#include "pipeline/runtime/pass_graph.h"

#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "pipeline/runtime/moved.h"

namespace torchspan::pipeline {
/// The node that all inputs lead to: keeps their gradients.
class PassGraph::InputNode final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    gradients_ = std::move(gradients);
    return {};
  }
  std::string name() const override { return "torchspan::pipeline::Received"; }
  void drop() { gradients_.clear(); }
  at::Tensor gradient(std::uint32_t input) const {
    return input < gradients_.size() ? gradients_[input] : at::Tensor();
  }

 private:
  torch::autograd::variable_list gradients_;
};

std::map<int, Activation> PassGraph::attach_inputs(const std::map<int, Activation>& inputs, bool records) {
  std::map<int, Activation> attached;
  input_node_ = engine::make_node<InputNode>();
  for (const auto& [link, activation] : inputs) {
    Activation& here = attached[link];
    here = activation;
    for (std::size_t i = 0; i < here.batch.members.size(); ++i) {
      if (!is_defined_tensor(here.batch.members[i])) continue;
      at::Tensor tensor = here.batch.members[i].toTensor().detach();
      if (records && here.wants_gradient[i] != 0) torch::autograd::create_gradient_edge(tensor, input_node_);
      here.batch.members[i] = std::move(tensor);
    }
  }
  return attached;
}

void PassGraph::keep_edges(const LayerRangeOutputs& outputs, double loss_weight) {
  exits_.clear();
  for (const auto& [link, batch] : outputs.batches) {
    for (std::size_t i = 0; i < batch.members.size(); ++i) {
      if (!is_defined_tensor(batch.members[i]) || !batch.members[i].toTensor().requires_grad()) continue;
      exits_.push_back({link, i, torch::autograd::impl::gradient_edge(batch.members[i].toTensor())});
    }
  }
  if (!outputs.loss.defined() || !outputs.loss.requires_grad()) return;
  loss_edge_ = torch::autograd::impl::gradient_edge(outputs.loss);
  loss_gradient_ = at::full_like(outputs.loss.detach(), loss_weight);
}

void PassGraph::drop_edges() {
  exits_.clear();
  loss_edge_ = {};
}

/// Nodes that wait for the second part of a backward own the input node.
void PassGraph::drop_inputs() {
  static_cast<InputNode*>(input_node_.get())->drop();
  input_node_ = {};
}

PassGraph::Roots PassGraph::take_roots(std::map<int, std::vector<at::Tensor>>& gradients) const {
  Roots roots;
  for (const Exit& exit : exits_) {
    const auto found = gradients.find(exit.link);
    if (found == gradients.end() || exit.member >= found->second.size()) continue;
    if (!found->second[exit.member].defined()) continue;
    roots.edges.push_back(exit.edge);
    // From another worker it may arrive on the CPU.
    roots.gradients.push_back(moved(std::move(found->second[exit.member]),
                                    exit.edge.function->input_metadata(exit.edge.input_nr).device()));
  }
  if (loss_edge_.is_valid()) {
    roots.edges.push_back(loss_edge_);
    roots.gradients.push_back(loss_gradient_);
  }
  return roots;
}

void PassGraph::backward(std::map<int, std::vector<at::Tensor>>& gradients) {
  const Roots roots = take_roots(gradients);
  if (roots.edges.empty()) return;
  torch::autograd::Engine::get_default_engine().execute(roots.edges, roots.gradients, false, false, true);
}

void PassGraph::backward_inputs(std::map<int, std::vector<at::Tensor>>& gradients) {
  Roots roots = take_roots(gradients);
  auto two_parts = std::make_unique<TwoParts>(input_node_);
  for (std::size_t root = 0; root < roots.edges.size(); ++root)
    two_parts->pass.add_root(std::move(roots.edges[root]), std::move(roots.gradients[root]));
  drop_edges();
  two_parts->pass.run_inputs();
  two_parts_ = std::move(two_parts);
}

void PassGraph::backward_weights() {
  const std::unique_ptr<TwoParts> two_parts = std::move(two_parts_);
  two_parts->pass.run_weights();
  two_parts->sink.end()->wait();  // for hooks of parameters that hold the end of the pass
}

std::map<int, std::vector<at::Tensor>> PassGraph::input_gradients(
    const std::map<int, Activation>& inputs) const {
  const auto* input_node = static_cast<const InputNode*>(input_node_.get());
  std::map<int, std::vector<at::Tensor>> all;
  std::uint32_t input = 0;
  for (const auto& [link, activation] : inputs) {
    if (!activation.wants_any()) continue;
    std::vector<at::Tensor>& gradients = all[link];
    for (const std::uint8_t wants : activation.wants_gradient) {
      gradients.push_back(wants != 0 ? input_node->gradient(input++) : at::Tensor());
    }
  }
  return all;
}

}  // namespace torchspan::pipeline
