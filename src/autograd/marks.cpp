#include "autograd/marks.h"

#include <algorithm>
#include <fmt/format.h>

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

void check_context(const RecvNode& node, std::uint64_t context) {
  const MessageInfo& message = node.message();
  if (message.context == context) return;
  throw Error(
      ErrorKind::kInvalid,
      fmt::format("the loss depends on {}, which came in autograd context {:#x}, but is differentiated "
                  "in context {:#x}; run its forward pass in the context whose backward() it is for, "
                  "or detach what comes from another one",
                  message.text(), message.context, context));
}

void MarkWalk::reach(const RecvNode& node, std::uint32_t output) {
  check_context(node, context_);
  if (reached_[&node].insert(output).second) untold_[&node].push_back(output);
}

std::map<std::uint32_t, std::vector<MarkedSend>> MarkWalk::take_untold() {
  std::map<std::uint32_t, std::vector<MarkedSend>> marks;
  for (auto& [node, outputs] : std::exchange(untold_, {})) {
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

bool SendMarks::deliver(const std::vector<std::uint8_t>& reached) {
  if (std::exchange(has_gradients_, true)) return false;
  for (std::uint32_t output = 0; output < reached.size(); ++output) {
    if (reached[output] != 0) delivered_.insert(output);
  }
  return true;
}

bool SendMarks::agree() const {
  return std::includes(marked_.begin(), marked_.end(), delivered_.begin(), delivered_.end());
}

}  // namespace torchspan::autograd
