#include "autograd/smart/smart_marks.h"

#include <algorithm>

namespace torchspan::autograd {

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
