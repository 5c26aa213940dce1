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
      outbox_(std::make_shared<Outbox>(endpoint_)),
      sink_(*context_, key.id),
      graph_(sink_, options()),
      fast_sends_(key.mode == PassMode::kFast ? context_->unused_sends()
                                              : std::vector<std::shared_ptr<SendNode>>()),
      sends_(key.mode == PassMode::kFast ? Sends() : context_->count_sends()),
      over_(host_),
      walk_(context_->id()) {}

engine::PassOptions PassState::options() {
  engine::PassOptions options;
  options.thread_state = StrayGradients::watched_state();
  options.retain_graph = key_.retain_graph;
  options.threads = std::clamp<std::uint32_t>(key_.threads, 1, PassKey::kMostThreads);
  options.enlist = [this](UniqueFunction<void()> help) {
    UniqueFunction<void()> job = [self = shared_from_this(), help = std::move(help)]() mutable {
      const WorkScope scope(self->context_, self.get());
      help();
    };
    auto host = host_.lock();
    return host ? host->post(std::move(job)) : job();
  };
  options.failed = [this] { fail(describe_failure()); };
  if (key_.mode == PassMode::kSmart) options.counts = context_->edges();
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
  for (const auto& send : fast_sends_) graph_.add_pending(send);
  sink_.after_work(
      [self = shared_from_this()](const engine::PassStatus& status) { self->work_over(status); });
  sink_.end()->last([self = shared_from_this()](const engine::PassStatus& status) { self->end(status); });
  graph_.prepare();
  nodes_ = graph_.report(false).nodes + context_->edges()->size();
  if (sends_.count == 0) seal();
  if (is_root() && key_.mode == PassMode::kSmart) begin_marking(roots);
}

std::shared_ptr<SendNode> PassState::find_send(std::uint64_t message, std::uint32_t peer) const {
  auto send =
      key_.mode == PassMode::kFast ? context_->find_send(message) : context_->find_send(message, sends_.end);
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
    walk_from(send, message.reached);
  }
  send->place(message.gradients);
  delivery.gradients = std::move(message.gradients);
  graph_.deliver(*send, std::move(delivery));
}

/// Gradients may overtake their marks. What lies behind them is walked at once, so that what this worker
/// sends on says what it reaches; it is told on when the marks come, and until then the pass stays open here.
void PassState::walk_from(const std::shared_ptr<SendNode>& send, const std::vector<std::uint8_t>& reached) {
  enter();
  bool disagree = false, twice = false;
  {
    MutexLock lock(marks_mutex_);
    SendMarks& marks = join(send);
    twice = !marks.deliver(reached);
    std::vector<torch::autograd::Edge> edges;
    for (std::uint32_t output = 0;
         !twice && output < std::min<std::size_t>(reached.size(), send->num_outputs()); ++output) {
      if (reached[output] != 0) edges.push_back(send->next_edge(output));
    }
    walk_.walk(edges);
    if (!marks.agree()) disagree = disagreements_.insert(send->message().id).second;
  }
  if (!disagree) leave();
  if (twice) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("the gradients of {} came twice in one pass", send->message().text()));
  }
}

void PassState::drive() {
  if (const void* outer = StrayGradients::engine_pass()) stray_gradients_.begin_inside(outer);
  const WorkScope scope(context_, this);
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
  outbox_->ask(to, std::move(message),
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
    for (const auto& send : fast_sends_) context_->use_up(*send);
    return;
  }
  std::vector<std::shared_ptr<SendNode>> marked;
  {
    MutexLock lock(marks_mutex_);
    for (const auto& [message, marks] : marks_) {
      if (marks.is_marked()) marked.push_back(marks.send());
    }
  }
  for (const auto& send : marked) context_->use(*send);
}

/// For those who watch what passes cost.
void PassState::count_nodes() {
  const auto endpoint = endpoint_.lock();
  if (!endpoint) return;
  endpoint->runtime()
      .metrics.counter("autograd.counted_nodes")
      .add(sends_.counted + graph_.report(false).nodes);
}

PassWork PassState::work() const { return {graph_.report(false).executed, sent_, received_}; }

PartReport PassState::report() const {
  const engine::PassReport graph = graph_.report(false);
  PartReport mine{name_, false, graph.driven, graph.executed, sent_, received_, {}, outbox_->waiting()};
  const Worker me = worker();
  for (const MessageInfo& message : waits_for(graph)) {
    mine.waiting.push_back({message.id, message.call, message.site, message.reply,
                            me.endpoint()->name_of(message.peer), context_->is_unanswered(message.id)});
  }
  return mine;
}

std::vector<MessageInfo> PassState::waits_for(const engine::PassReport& graph) const {
  std::vector<MessageInfo> messages;
  for (auto* node : graph.waiting_for) {
    if (const auto* send = dynamic_cast<SendNode*>(node)) messages.push_back(send->message());
  }
  if (sealed_ || key_.mode == PassMode::kFast) return messages;
  std::vector<MessageInfo> all = context_->messages(sends_.end);
  MutexLock lock(marks_mutex_);
  for (MessageInfo& message : all) {
    if (!marks_.contains(message.id)) messages.push_back(std::move(message));
  }
  return messages;
}

}  // namespace torchspan::autograd
