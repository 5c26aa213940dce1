#include "autograd/pass.h"

#include <algorithm>
#include <fmt/format.h>

#include "autograd/current.h"

namespace torchspan::autograd {
PassState::PassState(const Worker& worker, std::shared_ptr<ContextState> context, PassKey key)
    : endpoint_(worker.endpoint()),
      host_(worker.endpoint()->host()),
      name_(worker.name()),
      rank_(worker.rank()),
      context_(std::move(context)),
      key_(key),
      sink_(*context_, key.id),
      graph_(sink_, options()),
      sends_(key.mode == PassMode::kFast ? context_->unused_sends() : context_->sends()),
      over_(host_),
      walk_(context_->id()) {}

engine::PassOptions PassState::options() {
  engine::PassOptions options;
  options.retain_graph = key_.retain_graph;
  options.threads = std::clamp<std::uint32_t>(key_.threads, 1, PassKey::kMostThreads);
  options.enlist = [this](UniqueFunction<void()> help) {
    UniqueFunction<void()> job = [self = shared_from_this(), help = std::move(help)]() mutable {
      CurrentScope scope(Current{self->context_, self.get()});
      help();
    };
    auto host = host_.lock();
    return host ? host->post(std::move(job)) : job();
  };
  options.failed = [this] { fail(describe_failure()); };
  return options;
}

Worker PassState::worker() const {
  auto endpoint = endpoint_.lock();
  if (!endpoint) throw Error(ErrorKind::kCancelled, fmt::format("worker '{}' was shut down", name_));
  return Worker(std::move(endpoint));
}

void PassState::prepare(const std::vector<at::Tensor>& roots) {
  is_root_ = !roots.empty();
  if (is_root()) had_gradients_ = true;  // nobody waits for the root's part but the root
  for (const at::Tensor& root : roots) graph_.add_root(root);
  for (const auto& send : sends_) graph_.add_pending(send);
  sink_.after_work(
      [self = shared_from_this()](const engine::PassStatus& status) { self->work_over(status); });
  sink_.end()->last([self = shared_from_this()](const engine::PassStatus& status) { self->end(status); });
  graph_.prepare();
  nodes_ = graph_.report(false).nodes;
  if (is_root() && key_.mode == PassMode::kSmart) begin_marking(roots);
}

std::shared_ptr<SendNode> PassState::find_send(std::uint64_t message, std::uint32_t peer) const {
  auto send = context_->find_send(message);
  if (send->message().peer == peer) return send;
  throw Error(ErrorKind::kInvalid, fmt::format("a gradient or mark for {} came from a worker that it was not "
                                               "sent to",
                                               send->message().text()));
}

void PassState::receive(PropagateGradients message, std::uint32_t peer) {
  const auto send = find_send(message.message, peer);
  ++received_;
  engine::Delivery delivery;
  if (key_.mode == PassMode::kFast) {
    for (const at::Tensor& gradient : message.gradients) delivery.reached.push_back(gradient.defined());
  } else {
    if (message.reached.size() != message.gradients.size())
      throw Error(ErrorKind::kInvalid, "gradients came that do not say for each whether it is reached");
    delivery.reached.assign(message.reached.begin(), message.reached.end());
    walk_from(*send, message.reached);
  }
  send->place(message.gradients);
  delivery.gradients = std::move(message.gradients);
  graph_.deliver(*send, std::move(delivery));
}

/// Gradients may overtake their marks. What lies behind them is walked at once, so that what this worker
/// sends on says what it reaches; it is told on when the marks come, and until then the pass stays open here.
void PassState::walk_from(const SendNode& send, const std::vector<std::uint8_t>& reached) {
  enter();
  bool disagree = false, twice = false;
  {
    MutexLock lock(marks_mutex_);
    SendMarks& marks = marks_[send.message().id];
    twice = !marks.deliver(reached);
    std::vector<torch::autograd::Edge> edges;
    for (std::uint32_t output = 0;
         !twice && output < std::min<std::size_t>(reached.size(), send.num_outputs()); ++output) {
      if (reached[output] != 0) edges.push_back(send.next_edge(output));
    }
    walk_.walk(edges);
    if (!marks.agree()) disagree = disagreements_.insert(send.message().id).second;
  }
  if (!disagree) leave();
  if (twice) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("the gradients of {} came twice in one pass", send.message().text()));
  }
}

void PassState::drive() {
  CurrentScope scope(Current{context_, this});
  graph_.run();
}

void PassState::send_back(const RecvNode& node, torch::autograd::variable_list gradients) {
  check_context(node, context_->id());
  PropagateGradients message{context_->id(),       id(), node.message().id, key_.retain_graph, key_.threads,
                             std::move(gradients), {}};
  if (key_.mode == PassMode::kSmart) {
    MutexLock lock(marks_mutex_);
    message.reached = walk_.reached(node, message.gradients.size());
  }
  const std::uint32_t to = node.message().peer;
  enter();
  ++sent_;
  // Liveness and the pass's own deadline watch over it: the ordinary limit of calls does not apply.
  ask_briefly(worker(), to, message, Deadline::never(),
              [weak = weak_from_this(), to, call = node.message()](PartOver over, std::exception_ptr error) {
                auto self = weak.lock();
                if (!self) return;
                if (error) {
                  self->post([=](PassState& pass) { pass.fail_without(to, to_error(error), call.text()); });
                } else if (over.failure) {
                  self->post([failure = *over.failure](PassState& pass) { pass.fail(failure); });
                } else {
                  self->leave();
                }
                let_go(std::move(self));
              });
}

/// In FAST mode all sends must take part in every pass, so those of this one go.
void PassState::use_up_sends() {
  if (key_.mode == PassMode::kFast) {
    for (const auto& send : sends_) context_->use_up(*send);
    return;
  }
  MutexLock lock(marks_mutex_);
  for (const auto& send : sends_) {
    const auto found = marks_.find(send->message().id);
    if (found != marks_.end() && found->second.is_marked()) context_->use(*send);
  }
}

PassWork PassState::work() const { return {graph_.report(false).executed, sent_, received_}; }

PartReport PassState::report() const {
  const engine::PassReport graph = graph_.report(false);
  PartReport mine{name_, false, graph.driven, graph.executed, sent_, received_, {}};
  const Worker me = worker();
  for (auto* node : graph.waiting_for) {
    auto* send = dynamic_cast<SendNode*>(node);
    if (send == nullptr) continue;
    const MessageInfo& message = send->message();
    mine.waiting.push_back(
        {message.id, message.call, message.site, message.reply, me.endpoint()->name_of(message.peer)});
  }
  return mine;
}

}  // namespace torchspan::autograd
