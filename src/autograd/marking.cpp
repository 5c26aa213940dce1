// SMART mode's marks: a diffusing computation (Dijkstra and Scholten, 1980) that runs beside the gradients.
#include <fmt/format.h>

#include "autograd/pass.h"
#include "autograd/telling.h"

namespace torchspan::autograd {

void PassState::begin_marking(const std::vector<at::Tensor>& roots) {
  enter();  // gradients that are back soon do not end the pass while this thread tells its marks
  {
    MutexLock lock(marks_mutex_);
    std::vector<torch::autograd::Edge> edges;
    for (const at::Tensor& root : roots) edges.push_back(torch::autograd::impl::gradient_edge(root));
    walk_.walk(edges);
    ++requests_;  // our own: nothing is final before all marks from here are on their way
  }
  tell_marks();
  end_request();
  leave();
}

/// Gradients that agree with the marks may end the pass while this thread tells the marks on: it is held.
void PassState::mark(const std::vector<MarkedSend>& sends, std::uint32_t peer, Answer<MarkSends>& answer) {
  enter();
  take_marks(find(sends, peer), answer);  // what it throws fails the pass
}

bool PassState::try_mark(const std::vector<MarkedSend>& sends, std::uint32_t peer,
                         Answer<MarkSends>& answer) {
  Marks marks;
  try {
    marks = find(sends, peer);
    enter();
  } catch (const Error&) {
    return false;
  }
  try {
    take_marks(marks, answer);
  } catch (...) {  // the pass has failed meanwhile
    const Error error = to_error(std::current_exception());
    if (answer) answer.give(MarkedWorkers{{}, as_told(error, name_)});
    post([error](PassState& pass) { pass.fail_here(error); });
  }
  return true;
}

PassState::Marks PassState::find(const std::vector<MarkedSend>& sends, std::uint32_t peer) const {
  Marks marks;
  for (const MarkedSend& marked : sends) {
    auto send = find_send(marked.message, peer);
    for (const std::uint32_t output : marked.outputs) {
      if (output >= send->num_outputs())
        throw Error(ErrorKind::kInvalid, "a mark names a tensor that is not in its message");
    }
    marks.emplace_back(std::move(send), marked);
  }
  return marks;
}

bool PassState::has_unmarked() {
  MutexLock lock(marks_mutex_);
  return marked_sends_ < sends_.count;
}

SendMarks& PassState::join(const std::shared_ptr<SendNode>& send) {
  const auto [place, is_new] = marks_.try_emplace(send->message().id, send);
  if (is_new) {
    graph_.add_pending(send);
    if (marks_.size() == sends_.count) seal();
  }
  return place->second;
}

/// Keeps the answer when these marks are the first of a time of marking, else gives it. Leaves.
void PassState::take_marks(const Marks& marks, Answer<MarkSends>& answer) {
  std::size_t settled = 0;
  {
    MutexLock lock(marks_mutex_);
    for (const auto& [send, marked] : marks) {
      std::vector<torch::autograd::Edge> edges;
      for (const std::uint32_t output : marked.outputs) edges.push_back(send->next_edge(output));
      walk_.walk(edges);
      if (marked.outputs.empty()) continue;
      SendMarks& known = join(send);
      if (!known.is_marked()) ++marked_sends_;
      known.mark(marked.outputs);
      if (known.agree()) settled += disagreements_.erase(marked.message);
    }
    if (marked_sends_ < sends_.count) unmarked_workers_.insert(rank_);
    if (!is_root() && !parent_) parent_.emplace(answer.take());
    ++requests_;
  }
  tell_marks();
  end_request();
  for (; settled > 0; --settled) leave();
  leave();
  if (answer) answer.give(has_unmarked() ? MarkedWorkers{{rank_}, {}} : MarkedWorkers{});
}

/// Tells the senders of what the walk has reached. Each answer that is out is an errand.
void PassState::tell_marks() {
  std::map<std::uint32_t, std::vector<MarkedSend>> marks;
  {
    MutexLock lock(marks_mutex_);
    marks = walk_.take_untold();
    requests_ += marks.size();
  }
  if (marks.empty()) return;
  for (auto& [rank, sends] : marks) {
    MarkSends message{context_->id(), id(), key_.retain_graph, key_.threads, std::move(sends)};
    enter();
    outbox_->ask(rank, std::move(message),
                 [weak = weak_from_this(), to = rank](MarkedWorkers marked, std::exception_ptr error) {
                   auto self = weak.lock();
                   if (!self) return;
                   self->hear_marked(std::move(marked), error, to);
                   let_go(std::move(self));
                 });
  }
}

void PassState::hear_marked(MarkedWorkers marked, const std::exception_ptr& error, std::uint32_t from) {
  if (error) return post([=](PassState& pass) { pass.fail_without(from, to_error(error)); });
  if (marked.failure) return post([failure = *marked.failure](PassState& pass) { pass.fail(failure); });
  note_unmarked(marked.ranks);
  end_request();
  leave();
}

void PassState::note_unmarked(const std::vector<std::uint32_t>& ranks) {
  MutexLock lock(marks_mutex_);
  unmarked_workers_.insert(ranks.begin(), ranks.end());
}

/// With the last errand this worker's part of the marking is over, for now: whoever set it off is told, and
/// at the root all marks are final.
void PassState::end_request() {
  std::optional<Answer<MarkSends>> parent;
  std::vector<std::uint32_t> workers;
  {
    MutexLock lock(marks_mutex_);
    if (--requests_ > 0) return;
    parent = std::exchange(parent_, std::nullopt);
    workers.assign(unmarked_workers_.begin(), unmarked_workers_.end());
  }
  if (!is_root()) {
    if (parent) parent->give(MarkedWorkers{std::move(workers), {}});
    return;
  }
  if (const auto endpoint = endpoint_.lock()) {
    for (const std::uint32_t rank : workers) {
      if (rank == rank_) continue;
      const MarksFinal message{context_->id(), id()};
      static_cast<void>(std::make_shared<Telling<MarksFinal>>(Worker(endpoint), rank, message)->start());
    }
  }
  marks_are_final();
}

bool PassState::seal() {
  sealed_ = true;
  return graph_.seal();
}

void PassState::marks_are_final() {
  if (seal()) post([](PassState& pass) { pass.drive(); });
}

}  // namespace torchspan::autograd
