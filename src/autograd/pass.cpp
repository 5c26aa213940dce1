#include "autograd/pass.h"

#include <fmt/format.h>

#include "autograd/current.h"
#include "autograd/messages.h"

namespace torchspan::autograd {

PassState::PassState(Worker worker, std::shared_ptr<ContextState> context, PassKey key)
    : worker_(std::move(worker)),
      context_(std::move(context)),
      key_(key),
      sink_(*context_, key.id),
      graph_(sink_, engine::PassOptions{key.retain_graph, {}}) {}

void PassState::prepare(const std::vector<at::Tensor>& roots) {
  is_root_ = !roots.empty();
  if (is_root()) had_gradients_ = true;  // nobody waits for the root's part but the root
  for (const at::Tensor& root : roots) graph_.add_root(root);
  sends_ = context_->sends();
  for (const auto& send : sends_) graph_.add_pending(send);
  graph_.prepare();
  sink_.after_pass([self = shared_from_this()](const engine::PassStatus& status) { self->end(status); });
  if (is_root() && key_.mode == PassMode::kSmart) begin_marking(roots);
}

void PassState::end(const engine::PassStatus& status) {
  if (!status.ok()) tell_abort(blame(to_error(status.error)));
  if (status.ok() && !key_.retain_graph) context_->remove_sends(used_sends());
  std::optional<Promise<MarkedWorkers>> parent;
  std::map<std::uint64_t, Promise<void>> disagreements;
  {
    MutexLock lock(marks_mutex_);
    parent = std::exchange(parent_, std::nullopt);
    disagreements.swap(disagreements_);
  }
  if (parent && status.error) parent->set_error(status.error);
  context_->end_pass(*this);
}

/// In SMART mode a send that took no part keeps its graph: a later loss may lead through it.
std::vector<std::shared_ptr<SendNode>> PassState::used_sends() {
  if (key_.mode == PassMode::kFast) return sends_;
  MutexLock lock(marks_mutex_);
  std::vector<std::shared_ptr<SendNode>> used;
  for (const auto& send : sends_) {
    const auto found = marks_.find(send->message());
    if (found != marks_.end() && found->second.is_marked()) used.push_back(send);
  }
  return used;
}

void PassState::receive(PropagateGradients message) {
  auto send = context_->find_send(message.message);
  if (!send) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("gradients came for message {:#x}, which this context did not send, or whose graph was "
                    "used up by an earlier pass (pass retain_graph to keep it)",
                    message.message));
  }
  engine::Delivery delivery;
  if (key_.mode == PassMode::kFast) {
    for (const at::Tensor& gradient : message.gradients) delivery.reached.push_back(gradient.defined());
  } else {
    message.reached.resize(message.gradients.size());
    delivery.reached.assign(message.reached.begin(), message.reached.end());
    walk_from(*send, message.reached);
  }
  delivery.gradients = std::move(message.gradients);
  graph_.deliver(*send, std::move(delivery));
}

/// Gradients may overtake their marks. What lies behind them is walked at once, so that what this worker
/// sends on says what it reaches; it is told on when the marks come, and until then the pass stays open here.
void PassState::walk_from(const SendNode& send, const std::vector<std::uint8_t>& reached) {
  std::optional<Future<void>> agreement;
  {
    MutexLock lock(marks_mutex_);
    std::vector<torch::autograd::Edge> edges;
    for (std::uint32_t output = 0; output < reached.size() && output < send.num_outputs(); ++output) {
      if (reached[output] != 0) edges.push_back(send.next_edge(output));
    }
    walk_.walk(edges);
    SendMarks& marks = marks_[send.message()];
    marks.deliver(reached);
    if (!marks.agree()) {
      const auto [found, fresh] = disagreements_.try_emplace(send.message(), worker_.endpoint()->host());
      agreement = found->second.future();
    }
  }
  if (agreement) sink_.hold(*agreement);
}

void PassState::drive() {
  CurrentScope scope(Current{context_, this});
  graph_.run();
}

void PassState::send_back(const RecvNode& node, torch::autograd::variable_list gradients) {
  PropagateGradients message{context_->id(),       id(), node.message(), key_.retain_graph,
                             std::move(gradients), {}};
  if (key_.mode == PassMode::kSmart) {
    MutexLock lock(marks_mutex_);
    message.reached = walk_.reached(node, message.gradients.size());
  }
  // Liveness and the pass's own deadline watch over it: the ordinary limit of calls does not apply.
  Future<Unit> answer = worker_.request(Destination(node.from()), message, Deadline::never());
  sink_.hold(answer.then([weak = weak_from_this(), call = node.call()](Future<Unit> done) {
    if (!done.error()) return;
    Error error = to_error(done.error());
    if (auto self = weak.lock()) self->fail(error);
    throw error;
  }));
}

std::string PassState::blame(const Error& error) const {
  return fmt::format("worker '{}': {}", worker_.name(), error.message());
}

void PassState::fail(const Error& error) {
  if (graph_.abort(error)) tell_abort(blame(error));
}

void PassState::aborted_elsewhere(const std::string& reason) {
  tell_abort(reason);
  graph_.abort(Error(ErrorKind::kRemoteFailure, fmt::format("the backward pass failed on {}", reason)));
}

void PassState::tell_abort(const std::string& reason) {
  if (told_.exchange(true)) return;
  context_->remember_aborted(id(), reason);
  for (std::uint32_t rank : context_->workers()) {
    if (rank != worker_.rank()) worker_.request(Destination(rank), AbortPass{context_->id(), id(), reason});
  }
}

std::string PassState::describe_waiting() const {
  std::string text;
  for (auto* node : graph_.report().waiting_for) {
    if (auto* send = dynamic_cast<SendNode*>(node)) {
      text +=
          fmt::format("\n  '{}' sent to worker '{}'", send->call(), worker_.endpoint()->name_of(send->to()));
    }
  }
  return text;
}

}  // namespace torchspan::autograd
