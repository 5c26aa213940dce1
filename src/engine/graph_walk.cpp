#include "engine/api/graph_walk.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include "engine/api/node_ptr.h"

namespace torchspan::engine {

using torch::autograd::Edge;
using torch::autograd::Node;

std::size_t EdgeCounts::add(const NodePtr& root) {
  MutexLock lock(mutex_);
  erase_destroyed();
  visit(root);
  for (std::size_t next = 0; next < fresh_.size(); ++next) {
    for (const Edge& edge : fresh_[next]->next_edges()) {
      if (edge.is_valid()) visit(edge.function);
    }
  }
  std::stable_sort(fresh_.begin(), fresh_.end(),
                   [](const Node* a, const Node* b) { return a->sequence_nr() < b->sequence_nr(); });
  for (Node* node : fresh_) {
    const auto& edges = node->next_edges();
    Entry& entry = nodes_.at(node);
    entry.places.resize(edges.size());
    for (std::size_t i = edges.size();
         i-- > 0;) {  // of edges to the same node, the first gets the highest place
      if (edges[i].is_valid()) entry.places[i] = nodes_.at(edges[i].function.get()).known.edges++;
    }
  }
  return std::exchange(fresh_, {}).size();
}

void EdgeCounts::visit(const NodePtr& node) {
  Entry& entry = nodes_[node.get()];
  if (!entry.node.expired()) return;
  entry = Entry{WeakNodePtr(node), {0, walked_++}};
  fresh_.push_back(node.get());
}

EdgeCounts::Places EdgeCounts::places(Node& node) const {
  MutexLock lock(mutex_);
  return nodes_.at(&node).places;
}

/// Runs when the number of entries has doubled, so that the cost of a node is constant on average.
void EdgeCounts::erase_destroyed() {
  if (nodes_.size() < sweep_at_) return;
  std::erase_if(nodes_, [](const auto& entry) { return entry.second.node.expired(); });
  sweep_at_ = std::max(kSweepAt, 2 * nodes_.size());
}

std::optional<EdgeCounts::Known> EdgeCounts::find(Node& node) const {
  MutexLock lock(mutex_);
  const auto found = nodes_.find(&node);
  if (found == nodes_.end() || found->second.node.expired()) return std::nullopt;
  return found->second.known;
}

std::size_t EdgeCounts::size() const {
  MutexLock lock(mutex_);
  return nodes_.size();
}

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
