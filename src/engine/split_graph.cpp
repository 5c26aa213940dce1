#include "engine/split_graph.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "engine/api/compat.h"

namespace torchspan::engine {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

/// Whether the node may run twice, each time for some of its edges. A custom function may have side effects, a
/// post hook must see all gradients at once, and fused recurrent cells compute all of them together.
bool can_run_twice(const Node& node) {
  if (!compat::is_generated(node) || !node.post_hooks().empty()) return false;
  const std::string name = node.name();
  for (const std::string_view fused : {"Rnn", "Lstm", "Gru"}) {
    if (name.find(fused) != std::string::npos) return false;
  }
  return true;
}

}  // namespace

SplitGraph::SplitGraph(const edge_list& roots, const std::vector<NodePtr>& inputs) {
  discover(roots);
  sort(roots);
  divide(inputs);
}

void SplitGraph::discover(const edge_list& roots) {
  const auto visit = [this](Node* node) {
    const auto [found, is_new] = index_.emplace(node, static_cast<std::uint32_t>(entries_.size()));
    if (is_new) {
      entries_.push_back({node});
      if (node->num_outputs() == 0) entries_.back().leaf = dynamic_cast<AccumulateGrad*>(node);
    }
    return found->second;
  };
  for (const Edge& root : roots) visit(root.function.get());
  for (std::size_t index = 0; index < entries_.size(); ++index) {
    const edge_list& edges = std::as_const(*entries_[index].node).next_edges();
    std::vector<Target> targets;
    targets.reserve(edges.size());
    for (const Edge& edge : edges) {
      targets.push_back(edge.is_valid() ? Target{visit(edge.function.get()), edge.input_nr} : Target{});
    }
    entries_[index].targets = std::move(targets);
  }
}

void SplitGraph::sort(const edge_list& roots) {
  std::vector<std::uint32_t> dependencies(entries_.size(), 0);
  for (const Entry& entry : entries_) {
    for (const Target& target : entry.targets) {
      if (target.index != kNowhere) ++dependencies[target.index];
    }
  }
  // Leaves first, then the highest sequence number, then the order of discovery.
  using Ready = std::tuple<std::uint64_t, std::int64_t>;
  std::priority_queue<Ready> ready;
  const auto make_ready = [&](std::uint32_t index) {
    const Entry& entry = entries_[index];
    const bool leaf = entry.leaf != nullptr;
    ready.emplace(leaf ? std::numeric_limits<std::uint64_t>::max() : entry.node->sequence_nr(),
                  -static_cast<std::int64_t>(index));
  };
  for (const Edge& root : roots) {
    const std::uint32_t index = index_.at(root.function.get());
    if (dependencies[index] == 0) make_ready(index);
    dependencies[index] =
        dependencies[index] == 0 ? kNowhere : dependencies[index];  // a root may be listed twice
  }
  std::vector<std::uint32_t> place(entries_.size(), kNowhere);
  std::vector<Entry> sorted;
  sorted.reserve(entries_.size());
  while (!ready.empty()) {
    const auto index = static_cast<std::uint32_t>(-std::get<1>(ready.top()));
    ready.pop();
    place[index] = static_cast<std::uint32_t>(sorted.size());
    for (const Target& target : entries_[index].targets) {
      if (target.index != kNowhere && --dependencies[target.index] == 0) make_ready(target.index);
    }
    sorted.push_back(std::move(entries_[index]));
  }
  entries_ = std::move(sorted);
  for (Entry& entry : entries_) {
    for (Target& target : entry.targets) {
      if (target.index != kNowhere) target.index = place[target.index];
    }
  }
  for (auto& [node, index] : index_) index = place[index];
}

void SplitGraph::divide(const std::vector<NodePtr>& inputs) {
  for (const NodePtr& input : inputs) {
    const auto found = index_.find(input.get());
    if (found != index_.end()) entries_[found->second].part = NodePart::kInputs;
  }
  // Gradients of vectors and scalars (biases, scales) take little time: a second run of the node would cost more
  // than it delays. A node comes before those that its edges lead to.
  std::vector<bool> reaches_matrix(entries_.size(), false);
  for (std::size_t next = entries_.size(); next-- > 0;) {
    Entry& entry = entries_[next];
    bool any_input = entry.part == NodePart::kInputs, any_weight = false;
    bool any_matrix = entry.leaf != nullptr && entry.leaf->variable.dim() >= 2;
    for (const Target& target : entry.targets) {
      if (target.index == kNowhere) continue;
      const bool weight = is_for_weights(target);
      any_input = any_input || !weight;
      any_weight = any_weight || weight;
      any_matrix = any_matrix || (weight && reaches_matrix[target.index]);
    }
    reaches_matrix[next] = any_matrix;
    if (!any_input) continue;
    entry.part = !any_weight                                ? NodePart::kInputs
                 : any_matrix && can_run_twice(*entry.node) ? NodePart::kBoth
                                                            : NodePart::kHeldBack;
  }
}

}  // namespace torchspan::engine
