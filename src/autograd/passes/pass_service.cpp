#include "autograd/passes/pass_service.h"

#include <fmt/format.h>
#include <utility>

#include "autograd/passes/pass_errors.h"
#include "core/api/throw_invalid.h"

namespace torchspan::autograd {

void PassService::serve(rpc::Registrar& registrar) {
  serve_answered(registrar, weak_from_this(), rpc::RunOn::kPool, &PassService::propagate);
  serve_answered(registrar, weak_from_this(), rpc::RunOn::kReceiver, &PassService::mark);
  registrar.handle<MarksFinal>(
      rpc::RunOn::kReceiver, [weak = weak_from_this()](const rpc::CallInfo& call, const MarksFinal& message) {
        require_alive(weak)->marks_are_final(call.peer, message);
        return Unit{};
      });
  registrar.handle<AbortPass>(rpc::RunOn::kPool,
                              [weak = weak_from_this()](const rpc::CallInfo&, const AbortPass& message) {
                                return require_alive(weak)->abort(message);
                              });
}

/// Throws if an earlier process of this rank sent `message`: its graph ended with it.
void PassService::check_process(std::uint64_t context, std::uint64_t message) const {
  if (!registry_->is_of_former_process(message)) return;
  const Worker me = worker_.require();
  throw Error(
      ErrorKind::kDisconnected,
      fmt::format("worker '{}' (rank {}) was replaced after the forward pass in autograd context {:#x}, and "
                  "the graph of the process before it is lost: run the forward pass again in a new Context",
                  me.name(), me.rank(), context))
      .with_worker(me.name());
}

/// The pass that a message of `peer` belongs to: the running one, or one that begins here now.
std::shared_ptr<PassState> PassService::join(std::uint64_t context_id, const PassKey& key,
                                             std::uint32_t peer) {
  auto context = registry_->find(context_id);
  if (!context) {
    throw_invalid("autograd context {:#x} was released before its pass was over", context_id);
  }
  std::shared_ptr<PassState> pass, superseded;
  while (!(pass = try_join(context, key, superseded))) {
    superseded->ending().fail_here(
        Error(ErrorKind::kCancelled, "this backward pass is over on the worker that began it"));
  }
  // A worker may have died while its message waited for a thread, and then found no pass to fail.
  for (const std::uint32_t rank : {peer, pass->root()}) {
    if (worker_.require().backend()->is_present(rank)) continue;
    const Error gone(ErrorKind::kDisconnected, "it has died or left");
    pass->ending().fail_without(rank, gone);
    throw Error(pass->ending().failure().value_or(gone));
  }
  return pass;
}

/// Null if an earlier pass of the same root must end first.
std::shared_ptr<PassState> PassService::try_join(const std::shared_ptr<ContextState>& context,
                                                 const PassKey& key, std::shared_ptr<PassState>& superseded) {
  const Worker me = worker_.require();
  std::vector<SendNodePtr> gone;
  std::shared_ptr<PassState> running, pass;  // their graphs may be destroyed after the lock is released
  MutexLock beginning(context->beginning());
  running = context->pass();
  if (running && running->id() == key.id) return running;
  if (running && running->root() == maker_of(key.id) && running->id() < key.id) {
    superseded = std::move(running);
    return nullptr;
  }
  if (running) {
    throw_invalid(
        "two backward passes run in one autograd context at once, begun by worker '{}' and by worker '{}'; "
        "run one after the other, or use one context for each",
        me.backend()->name_of(running->root()), me.backend()->name_of(maker_of(key.id)));
  }
  pass = std::make_shared<PassState>(me, context, key);
  context->begin_pass(pass);
  if (key.mode == PassMode::kFast) gone = context->sends().use_up_used();
  pass->prepare({});
  return pass;
}

/// Fails the pass, if there is one, with the current exception. Returns it for the sender of the message.
Error PassService::refuse(const std::shared_ptr<PassState>& pass) const {
  const std::string name = worker_.require().name();
  const Error cause = located(to_error(std::current_exception()), name);
  if (pass) pass->ending().fail(cause);
  return as_remote(cause, name);
}

void PassService::propagate(std::uint32_t peer, PropagateGradients message,
                            Answer<PropagateGradients> answer) {
  const PassMode mode = message.reached.empty() ? PassMode::kFast : PassMode::kSmart;
  std::shared_ptr<PassState> pass;
  try {
    check_process(message.context, message.message);
    pass = join(message.context, {message.pass, message.retain_graph, mode, message.threads}, peer);
    if (pass->claim_first_gradients()) pass->ending().answer_when_over(answer.take());
    pass->receive(std::move(message), peer);
    if (answer) answer.give(PartOver{});
    pass->drive();
  } catch (...) {
    PartOver over{refuse(pass)};
    if (answer) answer.give(over);
  }
}

/// Runs on the receiving thread if the pass is small, else on the pool.
void PassService::mark(std::uint32_t peer, MarkSends message, Answer<MarkSends> answer) {
  auto context = registry_->find(message.context);
  auto pass = context ? context->pass() : nullptr;
  if (pass && pass->id() == message.pass && pass->is_small()) {
    const bool marked = pass->try_mark(message.sends, peer, answer);
    PassState::release_on_pool(std::move(pass));
    if (marked) return;
  }
  const auto pool = worker_.continuations().lock();
  if (!pool) return;  // the sender is notified that this worker has stopped
  pool->post(
      [self = shared_from_this(), peer, message = std::move(message), answer = std::move(answer)]() mutable {
        self->mark_on_pool(peer, message, std::move(answer));
      });
}

void PassService::mark_on_pool(std::uint32_t peer, const MarkSends& message, Answer<MarkSends> answer) {
  std::shared_ptr<PassState> pass;
  try {
    for (const MarkedSend& send : message.sends) check_process(message.context, send.message);
    pass =
        join(message.context, {message.pass, message.retain_graph, PassMode::kSmart, message.threads}, peer);
    pass->mark(message.sends, peer, answer);
  } catch (...) {
    MarkedWorkers marked{{}, refuse(pass)};
    if (answer) answer.give(marked);
  }
}

/// Only the root may send this.
void PassService::marks_are_final(std::uint32_t peer, const MarksFinal& message) {
  auto context = registry_->find(message.context);
  auto pass = context ? context->pass() : nullptr;
  if (!pass) return;
  if (pass->id() == message.pass && pass->root() == peer) pass->marks_are_final();
  PassState::release_on_pool(std::move(pass));
}

Future<Unit> PassService::abort(const AbortPass& message) {
  std::shared_ptr<PassState> pass;
  if (auto context = registry_->find(message.context)) {
    MutexLock beginning(context->beginning());  // a pass that is beginning is found here or refused later
    pass = context->pass();
    if (!pass || pass->id() != message.pass) {
      context->refuse_pass(message.pass, message.failure);
      pass = nullptr;
    }
  }
  if (!pass) return make_ready_future<Unit>();
  pass->ending().fail(message.failure);
  return pass->ending().notified().then([](const Future<void>&) { return Unit{}; });
}

void PassService::abort_all(const Error& error) {
  for (const auto& context : registry_->all()) {
    if (auto pass = context->pass()) pass->ending().fail_here(error);
  }
}

void PassService::worker_departed(const std::vector<std::shared_ptr<ContextState>>& contexts,
                                  std::uint32_t rank, const Error& reason) {
  for (const auto& context : contexts) {
    const bool participates = context->workers().contains(rank), made = maker_of(context->id()) == rank;
    auto pass = context->pass();
    if (!pass) continue;
    if (participates || made || pass->root() == rank)
      pass->ending().fail_without(rank, reason, "", PassEnding::Close::kOnPool);
    PassState::release_on_pool(std::move(pass));
  }
}

}  // namespace torchspan::autograd
