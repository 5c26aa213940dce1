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
    ++errands_;  // our own: nothing is final before all marks from here are on their way
  }
  tell_marks();
  end_errand();
  leave();
}

/// Gradients that agree with the marks may end the pass while this thread tells the marks on: it is held.
Future<MarkedWorkers> PassState::mark(const std::vector<MarkedSend>& sends) {
  enter();
  Future<MarkedWorkers> answered = take_marks(sends);  // what it throws fails the pass
  leave();
  return answered;
}

Future<MarkedWorkers> PassState::take_marks(const std::vector<MarkedSend>& sends) {
  std::size_t settled = 0;
  Future<MarkedWorkers> answered = make_ready_future<MarkedWorkers>({{rank_}, {}});
  {
    MutexLock lock(marks_mutex_);
    for (const MarkedSend& marked : sends) {
      const auto send = context_->find_send(marked.message);
      if (!send) {
        throw Error(
            ErrorKind::kInvalid,
            fmt::format("message {:#x} takes part in this pass, but an earlier pass used its graph up: that "
                        "one needs retain_graph",
                        marked.message));
      }
      std::vector<torch::autograd::Edge> edges;
      for (const std::uint32_t output : marked.outputs) {
        if (output >= send->num_outputs()) {
          throw Error(ErrorKind::kInvalid, "a mark names a tensor that is not in its message");
        }
        edges.push_back(send->next_edge(output));
      }
      walk_.walk(edges);
      SendMarks& marks = marks_[marked.message];
      marks.mark(marked.outputs);
      if (marks.agree()) settled += disagreements_.erase(marked.message);
    }
    marked_workers_.insert(rank_);
    if (!is_root() && !parent_) answered = parent_.emplace(host_).future();
    ++errands_;
  }
  tell_marks();
  end_errand();
  for (; settled > 0; --settled) leave();
  return answered;
}

/// Tells the senders of what the walk has reached. Each answer that is out is an errand.
void PassState::tell_marks() {
  std::map<std::uint32_t, std::vector<MarkedSend>> marks;
  {
    MutexLock lock(marks_mutex_);
    marks = walk_.take_untold();
    errands_ += marks.size();
  }
  if (marks.empty()) return;
  const Worker me = worker();
  for (auto& [rank, sends] : marks) {
    const MarkSends message{context_->id(), id(), key_.retain_graph, key_.threads, std::move(sends)};
    enter();
    me.request(Destination(rank), message, Deadline::never())
        .then([weak = weak_from_this(), to = rank](Future<MarkedWorkers> done) {
          auto self = weak.lock();
          if (!self) return;
          if (done.error()) return self->fail_without(to, to_error(done.error()));
          const MarkedWorkers marked = done.wait();
          if (marked.failure) return self->fail(*marked.failure);
          self->note_marked(marked.ranks);
          self->end_errand();
          self->leave();
        });
  }
}

void PassState::note_marked(const std::vector<std::uint32_t>& ranks) {
  MutexLock lock(marks_mutex_);
  marked_workers_.insert(ranks.begin(), ranks.end());
}

/// With the last errand this worker's part of the marking is over, for now: whoever set it off is told, and
/// at the root all marks are final.
void PassState::end_errand() {
  std::optional<Promise<MarkedWorkers>> parent;
  std::vector<std::uint32_t> workers;
  {
    MutexLock lock(marks_mutex_);
    if (--errands_ > 0) return;
    parent = std::exchange(parent_, std::nullopt);
    workers.assign(marked_workers_.begin(), marked_workers_.end());
  }
  if (!is_root()) {
    if (parent) parent->set_value(MarkedWorkers{std::move(workers), {}});
    return;
  }
  if (const auto endpoint = endpoint_.lock()) {
    for (const std::uint32_t rank : workers) {
      if (rank == rank_) continue;
      std::make_shared<Telling<MarksFinal>>(Worker(endpoint), rank, MarksFinal{context_->id(), id()})
          ->start();
    }
  }
  marks_are_final();
}

void PassState::marks_are_final() {
  std::vector<std::shared_ptr<SendNode>> unmarked;
  {
    MutexLock lock(marks_mutex_);
    for (const auto& send : sends_) {
      const auto found = marks_.find(send->message().id);
      if (found == marks_.end() || !found->second.is_marked()) unmarked.push_back(send);
    }
  }
  for (const auto& send : unmarked) graph_.discard(*send);
  drive();
}

}  // namespace torchspan::autograd
