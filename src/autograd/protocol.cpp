#include "autograd/protocol.h"

#include <algorithm>
#include <fmt/format.h>

#include "autograd/graph.h"
#include "autograd/telling.h"

namespace torchspan::autograd {

Passes::Impl::Impl(rpc::Registrar& registrar)
    : worker(registrar.worker().endpoint()->weak_from_this()),
      host(registrar.host()),
      registry(std::make_shared<Registry>(registrar.worker().rank())),
      interceptor(registrar.runtime(), registry) {}

Worker Passes::Impl::require_worker() const {
  auto endpoint = worker.lock();
  if (!endpoint) throw Error(ErrorKind::kCancelled, "this worker was shut down");
  return Worker(endpoint);
}

template <rpc::Message M>
void Passes::Impl::serve_step(rpc::Registrar& registrar, void (Impl::*handler)(M, Answer<M>),
                              rpc::RunOn where) {
  registrar.handle_raw(M::kType, std::string(M::kName), where,
                       [weak = weak_from_this(), handler](const rpc::CallInfo&, wire::Payload& payload,
                                                          std::shared_ptr<rpc::Completion> done) {
                         auto alive = weak.lock();
                         if (!alive) throw Error(ErrorKind::kCancelled, "this worker was shut down");
                         (alive.get()->*handler)(wire::from_payload<M>(payload), Answer<M>(std::move(done)));
                       });
}

void Passes::Impl::serve(rpc::Registrar& registrar) {
  registrar.intercept(interceptor);
  auto impl = [weak = weak_from_this()] {
    auto alive = weak.lock();
    if (!alive) throw Error(ErrorKind::kCancelled, "this worker was shut down");
    return alive;
  };
  const auto on_pool = rpc::RunOn::kPool;
  serve_step<PropagateGradients>(registrar, &Impl::propagate, rpc::RunOn::kPool);
  serve_step<MarkSends>(registrar, &Impl::mark, rpc::RunOn::kReceiver);
  registrar.handle<MarksFinal>(rpc::RunOn::kReceiver,
                               [impl](const rpc::CallInfo&, const MarksFinal& message) {
                                 impl()->marks_are_final(message);
                                 return Unit{};
                               });
  registrar.handle<AbortPass>(
      on_pool, [impl](const rpc::CallInfo&, const AbortPass& message) { return impl()->abort(message); });
  serve_step<ReleaseContext>(registrar, &Impl::release_told, on_pool);
  registrar.handle<AskPass>(
      on_pool, [impl](const rpc::CallInfo&, const AskPass& message) { return impl()->ask_pass(message); });
  registrar.handle<AskGraph>(
      on_pool, [impl](const rpc::CallInfo&, const AskGraph& message) { return impl()->ask_graph(message); });
  registrar.handle<AdoptMember>(on_pool, [impl](const rpc::CallInfo& call, const AdoptMember& message) {
    return impl()->adopt(call, message);
  });
  registrar.on_departure([impl](std::uint32_t rank, const Error& reason) { impl()->depart(rank, reason); });
  registrar.on_shutdown([impl] { return impl()->releases_under_way(); });
}

/// The pass that a message belongs to: the one that runs, or a new one that begins here.
std::shared_ptr<PassState> Passes::Impl::join(std::uint64_t context_id, const PassKey& key) {
  auto context = registry->find(context_id);
  if (!context) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("autograd context {:#x} was released before its pass was over", context_id));
  }
  const Worker me = require_worker();
  MutexLock beginning(context->beginning());
  auto running = context->pass();
  if (running && running->id() == key.id) return running;
  if (running && running->root() == maker_of(key.id) && running->id() < key.id) {
    running->fail_here(Error(ErrorKind::kCancelled, "this backward pass is over where it began"));
    running = nullptr;
  }
  auto pass = std::make_shared<PassState>(me, context, key);
  if (context->begin_pass(pass)) {
    pass->prepare({});
    return pass;
  }
  throw Error(ErrorKind::kInvalid,
              fmt::format("two backward passes run in one autograd context at once, begun by worker '{}' and "
                          "by worker '{}'; run one after the other, or give each its own context",
                          me.endpoint()->name_of(running ? running->root() : maker_of(key.id)),
                          me.endpoint()->name_of(maker_of(key.id))));
}

namespace {

/// Why a message of a pass was refused here; the pass, if there is one, fails with it.
Error refuse(const Worker& me, const std::shared_ptr<PassState>& pass) {
  const Error cause = located(to_error(std::current_exception()), me.name());
  if (pass) pass->fail(cause);
  return as_told(cause, me.name());
}

}  // namespace

void Passes::Impl::propagate(PropagateGradients message, Answer<PropagateGradients> answer) {
  const PassMode mode = message.reached.empty() ? PassMode::kFast : PassMode::kSmart;
  std::shared_ptr<PassState> pass;
  try {
    pass = join(message.context, {message.pass, message.retain_graph, mode, message.threads});
    if (pass->claim_first_gradients()) pass->tell_part_over(answer.take());
    pass->receive(std::move(message));
    if (answer) answer.give(PartOver{});
    pass->drive();
  } catch (...) {
    PartOver over{refuse(require_worker(), pass)};
    if (answer) answer.give(over);
  }
}

/// On the thread that received them, where that takes a moment only.
void Passes::Impl::mark(MarkSends message, Answer<MarkSends> answer) {
  auto context = registry->find(message.context);
  auto pass = context ? context->pass() : nullptr;
  if (pass && pass->id() == message.pass && pass->is_small()) {
    const bool marked = pass->try_mark(message.sends, answer);
    PassState::let_go(std::move(pass));
    if (marked) return;
  }
  const auto pool = host.lock();
  if (!pool) return;  // who asks hears that this worker is gone
  pool->post([self = shared_from_this(), message = std::move(message), answer = std::move(answer)]() mutable {
    self->mark_slowly(message, std::move(answer));
  });
}

void Passes::Impl::mark_slowly(const MarkSends& message, Answer<MarkSends> answer) {
  std::shared_ptr<PassState> pass;
  try {
    pass = join(message.context, {message.pass, message.retain_graph, PassMode::kSmart, message.threads});
    pass->mark(message.sends, answer);
  } catch (...) {
    MarkedWorkers marked{{}, refuse(require_worker(), pass)};
    if (answer) answer.give(marked);
  }
}

void Passes::Impl::marks_are_final(const MarksFinal& message) {
  auto context = registry->find(message.context);
  auto pass = context ? context->pass() : nullptr;
  if (!pass) return;
  if (pass->id() == message.pass) pass->marks_are_final();
  PassState::let_go(std::move(pass));
}

Future<Unit> Passes::Impl::abort(const AbortPass& message) {
  std::shared_ptr<PassState> pass;
  if (auto context = registry->find(message.context)) {
    MutexLock beginning(context->beginning());  // a pass that begins is found, or does not begin any more
    pass = context->pass();
    if (!pass || pass->id() != message.pass) {
      context->end_pass(message.pass, message.failure);
      pass = nullptr;
    }
  }
  if (!pass) return make_ready_future<Unit>();
  pass->fail(message.failure);
  return pass->told().then([](const Future<void>&) { return Unit{}; });
}

Future<void> Passes::Impl::release(std::uint64_t id) {
  auto context = registry->remove(id);
  if (!context || !context->release()) return make_ready_future<void>();
  if (auto pass = context->pass()) {
    pass->fail_here(
        Error(ErrorKind::kCancelled, "the autograd context was released while its backward pass ran"));
  }
  auto endpoint = worker.lock();
  if (!endpoint) return make_ready_future<void>();
  Future<void> told = tell_all(Worker(endpoint), *context, ReleaseContext{id});
  MutexLock lock(mutex_);
  std::erase_if(releases_, [](const Future<void>& release) { return release.done(); });
  releases_.push_back(told);
  return told;
}

void Passes::Impl::release_told(ReleaseContext message, Answer<ReleaseContext> answer) {
  const Future<void> told = release(message.context);
  if (told.done()) return answer.give(Unit{});
  told.then([answer = std::make_shared<Answer<ReleaseContext>>(std::move(answer))](const Future<void>&) {
    answer->give(Unit{});
  });
}

Future<void> Passes::Impl::releases_under_way() {
  MutexLock lock(mutex_);
  return when_all(releases_);
}

void Passes::Impl::abort_all(const Error& error) {
  for (const auto& context : registry->all()) {
    if (auto pass = context->pass()) pass->fail_here(error);
  }
}

/// Passes need everybody; a context needs its maker, who ends it, and a way to hear of that.
void Passes::Impl::depart(std::uint32_t rank, const Error& reason) {
  const Worker me = require_worker();
  for (const auto& context : registry->all()) {
    const std::uint32_t maker = maker_of(context->id());
    const bool dealt = context->workers().contains(rank);
    if (auto pass = context->pass(); pass && (dealt || maker == rank)) pass->fail_without(rank, reason);
    if (maker == rank) {
      release(context->id());
    } else if (dealt && maker != me.rank()) {
      me.request(Destination(maker), AdoptMember{context->id()}, me.runtime().executor.deadline_in(kPatience))
          .then([weak = weak_from_this(), id = context->id()](Future<bool> done) {
            auto self = weak.lock();
            if (self && !done.error() && !done.wait()) self->release(id);
          });
    }
  }
}

bool Passes::Impl::adopt(const rpc::CallInfo& call, const AdoptMember& message) {
  auto context = registry->find(message.context);
  return context && context->add_worker(call.peer);
}

PartReport Passes::Impl::report_of(ContextState& context, std::uint64_t id) const {
  const Worker me = require_worker();
  auto pass = context.pass();
  if (pass && pass->id() == id) return pass->report();
  PartReport unheard{me.name(), false, 0, 0, 0, {}};
  for (const auto& send : context.sends()) {
    const MessageInfo& message = send->message();
    unheard.waiting.push_back(
        {message.id, message.call, message.site, message.reply, me.endpoint()->name_of(message.peer)});
  }
  return unheard;
}

Future<std::vector<PartReport>> Passes::Impl::ask_pass(const AskPass& message) {
  auto context = registry->find(message.context);
  if (!context || !context->is_first_of(message.wave)) return make_ready_future<std::vector<PartReport>>();
  return ask_all(require_worker(), *context, message, {report_of(*context, message.pass)});
}

Future<std::vector<WorkerGraph>> Passes::Impl::ask_graph(const AskGraph& message) {
  auto context = registry->find(message.context);
  if (!context || !context->is_first_of(message.wave)) return make_ready_future<std::vector<WorkerGraph>>();
  const Worker me = require_worker();
  return ask_all(me, *context, message, {graph_of(me, *context, {})});
}

ContextGraph Passes::Impl::graph(const std::shared_ptr<ContextState>& context,
                                 const std::vector<at::Tensor>& roots) {
  const Worker me = require_worker();
  const AskGraph question{context->id(), registry->next_id()};
  context->is_first_of(question.wave);
  ContextGraph graph{context->id(), ask_all(me, *context, question, {graph_of(me, *context, roots)}).wait()};
  std::sort(graph.workers.begin(), graph.workers.end(),
            [](const WorkerGraph& a, const WorkerGraph& b) { return a.rank < b.rank; });
  return graph;
}

}  // namespace torchspan::autograd
