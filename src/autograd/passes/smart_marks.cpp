#include "autograd/passes/smart_marks.h"

#include <algorithm>
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

void SmartMarks::begin(const std::vector<at::Tensor>& roots) {
  MutexLock lock(mutex_);
  std::vector<torch::autograd::Edge> edges;
  for (const at::Tensor& root : roots) edges.push_back(torch::autograd::impl::gradient_edge(root));
  walk_.walk(edges);
  ++requests_;
}

SmartMarks::Marked SmartMarks::mark(const Marks& marks, Answer<MarkSends>& answer) {
  Marked result;
  MutexLock lock(mutex_);
  for (const auto& [send, marked] : marks) {
    std::vector<torch::autograd::Edge> edges;
    for (const std::uint32_t output : marked.outputs) edges.push_back(send->next_edge(output));
    walk_.walk(edges);
    if (marked.outputs.empty()) continue;
    SendMarks& known = join(send);
    if (!known.is_marked()) ++marked_;
    known.mark(marked.outputs);
    if (known.agree()) result.settled += disagreements_.erase(marked.message);
  }
  if (marked_ < graph_.send_count()) unmarked_workers_.insert(rank_);
  if (!is_root() && !parent_) parent_.emplace(answer.take());
  ++requests_;
  result.sealed = seal_if_complete() && has_delivered_;
  return result;
}

SmartMarks::Delivered SmartMarks::deliver(const SendNodePtr& send, const std::vector<std::uint8_t>& reached) {
  Delivered result;
  MutexLock lock(mutex_);
  SendMarks& marks = join(send);
  has_delivered_ = true;
  seal_if_complete();
  result.twice = !marks.deliver(reached);
  std::vector<torch::autograd::Edge> edges;
  const auto outputs = std::min<std::size_t>(reached.size(), send->num_outputs());
  for (std::uint32_t output = 0; !result.twice && output < outputs; ++output) {
    if (reached[output] != 0) edges.push_back(send->next_edge(output));
  }
  walk_.walk(edges);
  if (!marks.agree()) result.disagrees = disagreements_.insert(send->message().id).second;
  return result;
}

/// The pass reaches this send.
SendMarks& SmartMarks::join(const SendNodePtr& send) {
  const auto [place, is_new] = reached_.try_emplace(send->message().id, send);
  if (is_new) graph_.add_send(send);
  return place->second;
}

/// The graph waits for no other sends once the pass reaches all. False if it was sealed before.
bool SmartMarks::seal_if_complete() {
  return !graph_.is_sealed() && reached_.size() == graph_.send_count() && graph_.seal();
}

std::map<std::uint32_t, std::vector<MarkedSend>> SmartMarks::take_unsent() {
  MutexLock lock(mutex_);
  auto marks = walk_.take_unsent();
  requests_ += marks.size();
  return marks;
}

void SmartMarks::add_unmarked_workers(const std::vector<std::uint32_t>& ranks) {
  MutexLock lock(mutex_);
  unmarked_workers_.insert(ranks.begin(), ranks.end());
}

std::optional<SmartMarks::Round> SmartMarks::end_request() {
  Round round;
  MutexLock lock(mutex_);
  if (--requests_ > 0) return std::nullopt;
  round.parent = std::exchange(parent_, std::nullopt);
  round.unmarked_workers.assign(unmarked_workers_.begin(), unmarked_workers_.end());
  return round;
}

std::optional<Answer<MarkSends>> SmartMarks::take_parent() {
  MutexLock lock(mutex_);
  return std::exchange(parent_, std::nullopt);
}

bool SmartMarks::has_unmarked() const {
  MutexLock lock(mutex_);
  return marked_ < graph_.send_count();
}

std::vector<std::uint8_t> SmartMarks::reached(const RecvNode& node, std::size_t outputs) const {
  MutexLock lock(mutex_);
  return walk_.reached(node, outputs);
}

std::vector<SendNodePtr> SmartMarks::reached_sends() const {
  std::vector<SendNodePtr> sends;
  MutexLock lock(mutex_);
  for (const auto& [message, marks] : reached_) sends.push_back(marks.send());
  return sends;
}

std::vector<SendNodePtr> SmartMarks::marked_sends() const {
  std::vector<SendNodePtr> sends;
  MutexLock lock(mutex_);
  for (const auto& [message, marks] : reached_) {
    if (marks.is_marked()) sends.push_back(marks.send());
  }
  return sends;
}

std::vector<MessageInfo> SmartMarks::unreached(std::vector<MessageInfo> messages) const {
  std::vector<MessageInfo> left;
  MutexLock lock(mutex_);
  for (MessageInfo& message : messages) {
    if (!reached_.contains(message.id)) left.push_back(std::move(message));
  }
  return left;
}

}  // namespace torchspan::autograd
