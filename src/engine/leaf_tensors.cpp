#include "engine/api/leaf_tensors.h"

#include <unordered_set>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include "engine/api/node_ptr.h"

namespace torchspan::engine {

std::vector<at::Tensor> leaf_tensors(const std::vector<at::Tensor>& roots) {
  using torch::autograd::Node;
  std::vector<at::Tensor> leaves;
  std::vector<Node*> order;
  std::unordered_set<Node*> seen;
  std::vector<NodePtr> kept;  // the node of a leaf that is a root may have no other owner
  for (const at::Tensor& root : roots) {
    if (!root.defined() || !root.requires_grad()) continue;
    kept.push_back(torch::autograd::impl::gradient_edge(root).function);
    if (seen.insert(kept.back().get()).second) order.push_back(kept.back().get());
  }
  for (std::size_t next = 0; next < order.size(); ++next) {
    const auto& edges = order[next]->next_edges();
    if (edges.empty()) {
      if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(order[next]))
        leaves.push_back(leaf->variable);
    }
    for (const auto& edge : edges) {
      if (edge.is_valid() && seen.insert(edge.function.get()).second) order.push_back(edge.function.get());
    }
  }
  return leaves;
}

}  // namespace torchspan::engine
