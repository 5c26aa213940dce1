#include "autograd/pass.h"

#include <fmt/format.h>

#include "autograd/current.h"
#include "autograd/messages.h"

namespace torchspan::autograd {

PassState::PassState(Worker worker, std::shared_ptr<ContextState> context, std::uint64_t id,
                     bool retain_graph)
    : worker_(std::move(worker)),
      context_(std::move(context)),
      id_(id),
      retain_graph_(retain_graph),
      sink_(context_->gradients(), id),
      graph_(sink_, engine::PassOptions{retain_graph, {}}) {}

void PassState::prepare(const std::vector<at::Tensor>& roots) {
  for (const at::Tensor& root : roots) graph_.add_root(root);
  sends_ = context_->sends();
  for (const auto& send : sends_) graph_.add_pending(send);
  graph_.prepare();
  sink_.after_pass([self = shared_from_this()](const engine::PassStatus& status) {
    if (!status.ok()) self->tell_abort(self->blame(to_error(status.error)));
    if (status.ok() && !self->retain_graph_) self->context_->remove_sends(self->sends_);
    self->context_->end_pass(*self);
  });
}

void PassState::receive(std::uint64_t message, std::vector<at::Tensor> gradients) {
  auto send = context_->find_send(message);
  if (!send) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("gradients came for message {:#x}, which this context did not send, or whose graph was "
                    "used up by an earlier pass (pass retain_graph to keep it)",
                    message));
  }
  engine::Delivery delivery;
  for (const at::Tensor& gradient : gradients) delivery.reached.push_back(gradient.defined());
  delivery.gradients = std::move(gradients);
  graph_.deliver(*send, std::move(delivery));
}

void PassState::drive() {
  CurrentScope scope(Current{context_, this});
  graph_.run();
}

void PassState::send_back(const RecvNode& node, torch::autograd::variable_list gradients) {
  PropagateGradients message{context_->id(), id_, node.message(), retain_graph_, std::move(gradients)};
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
  context_->remember_aborted(id_, reason);
  for (std::uint32_t rank : context_->workers()) {
    if (rank != worker_.rank()) worker_.request(Destination(rank), AbortPass{context_->id(), id_, reason});
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
