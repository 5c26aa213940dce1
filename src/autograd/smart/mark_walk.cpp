#include "autograd/smart/mark_walk.h"

#include <utility>

namespace torchspan::autograd {

void MarkWalk::walk(const std::vector<torch::autograd::Edge>& edges) {
  std::vector<torch::autograd::Edge> ahead = edges;
  while (!ahead.empty()) {
    const torch::autograd::Edge edge = std::move(ahead.back());
    ahead.pop_back();
    if (!edge.is_valid()) continue;
    if (const auto* receive = dynamic_cast<const RecvNode*>(edge.function.get())) {
      reach(*receive, edge.input_nr);
    } else if (walked_.insert(edge.function.get()).second) {
      const auto& next = edge.function->next_edges();
      ahead.insert(ahead.end(), next.begin(), next.end());
    }
  }
}

void MarkWalk::reach(const RecvNode& node, std::uint32_t output) {
  node.check_context(context_);
  if (reached_[&node].insert(output).second) unsent_[&node].push_back(output);
}

std::map<std::uint32_t, std::vector<MarkedSend>> MarkWalk::take_unsent() {
  std::map<std::uint32_t, std::vector<MarkedSend>> marks;
  for (auto& [node, outputs] : std::exchange(unsent_, {})) {
    marks[node->message().peer].push_back({node->message().id, std::move(outputs)});
  }
  return marks;
}

std::vector<std::uint8_t> MarkWalk::reached(const RecvNode& node, std::size_t outputs) const {
  std::vector<std::uint8_t> flags(outputs, 0);
  const auto found = reached_.find(&node);
  if (found == reached_.end()) return flags;
  for (const std::uint32_t output : found->second) {
    if (output < outputs) flags[output] = 1;
  }
  return flags;
}

}  // namespace torchspan::autograd
