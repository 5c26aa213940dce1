#include "autograd/protocol.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "autograd/graph.h"
#include "autograd/telling.h"

namespace torchspan::autograd {

AutogradExtension::Impl::Impl(rpc::Registrar& registrar)
    : worker(registrar.worker().endpoint()->weak_from_this()),
      host(registrar.host()),
      registry(std::make_shared<Registry>(registrar.worker().name(),
                                          [worker = worker] {
                                            const auto endpoint = worker.lock();
                                            if (!endpoint)
                                              throw Error(ErrorKind::kCancelled, "this worker was shut down");
                                            return endpoint->next_id();
                                          })),
      interceptor(registrar.runtime(), registry),
      metrics_(registrar.runtime().metrics),
      stray_gradients_(registrar.runtime().log, registrar.runtime().executor) {}

Worker AutogradExtension::Impl::require_worker() const {
  auto endpoint = worker.lock();
  if (!endpoint) throw Error(ErrorKind::kCancelled, "this worker was shut down");
  return Worker(endpoint);
}

template <rpc::Message M>
void AutogradExtension::Impl::serve_step(rpc::Registrar& registrar,
                                         void (Impl::*handler)(std::uint32_t, M, Answer<M>),
                                         rpc::RunOn where) {
  registrar.handle_raw(M::kType, std::string(M::kName), where,
                       [weak = weak_from_this(), handler](const rpc::CallInfo& call, wire::Payload& payload,
                                                          std::shared_ptr<rpc::Completion> done) {
                         auto alive = weak.lock();
                         if (!alive) throw Error(ErrorKind::kCancelled, "this worker was shut down");
                         (alive.get()->*handler)(call.peer, wire::from_payload<M>(payload),
                                                 Answer<M>(std::move(done)));
                       });
}

void AutogradExtension::Impl::serve(rpc::Registrar& registrar) {
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
                               [impl](const rpc::CallInfo& call, const MarksFinal& message) {
                                 impl()->marks_are_final(call.peer, message);
                                 return Unit{};
                               });
  registrar.handle<AbortPass>(
      on_pool, [impl](const rpc::CallInfo&, const AbortPass& message) { return impl()->abort(message); });
  serve_step<ReleaseContext>(registrar, &Impl::release_told, on_pool);
  serve_step<AskPass>(registrar, &Impl::ask_pass, rpc::RunOn::kReceiver);  // the pool may be at work
  serve_step<AskGraph>(registrar, &Impl::ask_graph, on_pool);
  registrar.handle<AdoptMember>(on_pool, [impl](const rpc::CallInfo& call, const AdoptMember& message) {
    return impl()->adopt(call, message);
  });
  interceptor.when_heard_of(
      [weak = weak_from_this()](const std::shared_ptr<ContextState>& context, std::uint32_t peer) {
        const auto self = weak.lock();
        const auto endpoint = self ? self->worker.lock() : nullptr;
        if (endpoint && !endpoint->is_present(peer)) self->lost_touch(context);
      });
  registrar.on_departure([impl](std::uint32_t rank, const Error& reason) { impl()->depart(rank, reason); });
  registrar.on_shutdown([impl] { return impl()->releases_under_way(); });
}

std::shared_ptr<ContextState> AutogradExtension::Impl::join_context(std::uint64_t id, std::uint32_t peer) {
  auto context = registry->find_or_create(id);
  const auto dealt = context ? context->add_worker(peer) : ContextState::Dealt::kEnded;
  if (dealt == ContextState::Dealt::kEnded) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("autograd context {:#x} has ended, so what was asked for in it came too late", id));
  }
  if (dealt == ContextState::Dealt::kNow && !require_worker().endpoint()->is_present(peer))
    lost_touch(context);
  return context;
}

/// The pass that a message of `peer` belongs to: the one that runs, or a new one that begins here.
std::shared_ptr<PassState> AutogradExtension::Impl::join(std::uint64_t context_id, const PassKey& key,
                                                         std::uint32_t peer) {
  auto context = registry->find(context_id);
  if (!context) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("autograd context {:#x} was released before its pass was over", context_id));
  }
  std::shared_ptr<PassState> pass, superseded;
  while (!(pass = try_join(context, key, superseded))) {
    superseded->fail_here(Error(ErrorKind::kCancelled, "this backward pass is over where it began"));
  }
  // Who died while its message waited for a thread: its departure may have found no pass to end.
  for (const std::uint32_t rank : {peer, pass->root()}) {
    if (require_worker().endpoint()->is_present(rank)) continue;
    const Error gone(ErrorKind::kDisconnected, "it is gone");
    pass->fail_without(rank, gone);
    throw Error(pass->failure().value_or(gone));
  }
  return pass;
}

/// Null when another pass of the same root has to end first.
std::shared_ptr<PassState> AutogradExtension::Impl::try_join(const std::shared_ptr<ContextState>& context,
                                                             const PassKey& key,
                                                             std::shared_ptr<PassState>& superseded) {
  const Worker me = require_worker();
  std::vector<std::shared_ptr<SendNode>> gone;
  std::shared_ptr<PassState> running, pass;  // graphs may end with them, under no lock
  MutexLock beginning(context->beginning());
  running = context->pass();
  if (running && running->id() == key.id) return running;
  if (running && running->root() == maker_of(key.id) && running->id() < key.id) {
    superseded = std::move(running);
    return nullptr;
  }
  if (running) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("two backward passes run in one autograd context at once, begun by worker '{}' "
                    "and by worker '{}'; run one after the other, or give each its own context",
                    me.endpoint()->name_of(running->root()), me.endpoint()->name_of(maker_of(key.id))));
  }
  pass = std::make_shared<PassState>(me, context, key);
  context->begin_pass(pass);
  if (key.mode == PassMode::kFast) gone = context->use_up_used();
  pass->prepare({});
  return pass;
}

namespace {

PartReport silent_part(std::uint32_t, const std::string& name) {
  PartReport part;
  part.worker = name;
  part.silent = true;
  return part;
}

WorkerGraph silent_graph(std::uint32_t rank, const std::string& name) { return {name, rank, true, {}}; }

/// Why a message of a pass was refused here; the pass, if there is one, fails with it.
Error refuse(const Worker& me, const std::shared_ptr<PassState>& pass) {
  const Error cause = located(to_error(std::current_exception()), me.name());
  if (pass) pass->fail(cause);
  return as_told(cause, me.name());
}

}  // namespace

void AutogradExtension::Impl::propagate(std::uint32_t peer, PropagateGradients message,
                                        Answer<PropagateGradients> answer) {
  const PassMode mode = message.reached.empty() ? PassMode::kFast : PassMode::kSmart;
  std::shared_ptr<PassState> pass;
  try {
    pass = join(message.context, {message.pass, message.retain_graph, mode, message.threads}, peer);
    if (pass->claim_first_gradients()) pass->tell_part_over(answer.take());
    pass->receive(std::move(message), peer);
    if (answer) answer.give(PartOver{});
    pass->drive();
  } catch (...) {
    PartOver over{refuse(require_worker(), pass)};
    if (answer) answer.give(over);
  }
}

/// On the thread that received them, where that takes a moment only.
void AutogradExtension::Impl::mark(std::uint32_t peer, MarkSends message, Answer<MarkSends> answer) {
  auto context = registry->find(message.context);
  auto pass = context ? context->pass() : nullptr;
  if (pass && pass->id() == message.pass && pass->is_small()) {
    const bool marked = pass->try_mark(message.sends, peer, answer);
    PassState::let_go(std::move(pass));
    if (marked) return;
  }
  const auto pool = host.lock();
  if (!pool) return;  // who asks hears that this worker is gone
  pool->post([self = shared_from_this(), peer, message = std::move(message),
              answer = std::move(answer)]() mutable { self->mark_slowly(peer, message, std::move(answer)); });
}

void AutogradExtension::Impl::mark_slowly(std::uint32_t peer, const MarkSends& message,
                                          Answer<MarkSends> answer) {
  std::shared_ptr<PassState> pass;
  try {
    pass =
        join(message.context, {message.pass, message.retain_graph, PassMode::kSmart, message.threads}, peer);
    pass->mark(message.sends, peer, answer);
  } catch (...) {
    MarkedWorkers marked{{}, refuse(require_worker(), pass)};
    if (answer) answer.give(marked);
  }
}

/// The root says so, and nobody else.
void AutogradExtension::Impl::marks_are_final(std::uint32_t peer, const MarksFinal& message) {
  auto context = registry->find(message.context);
  auto pass = context ? context->pass() : nullptr;
  if (!pass) return;
  if (pass->id() == message.pass && pass->root() == peer) pass->marks_are_final();
  PassState::let_go(std::move(pass));
}

Future<Unit> AutogradExtension::Impl::abort(const AbortPass& message) {
  std::shared_ptr<PassState> pass;
  if (auto context = registry->find(message.context)) {
    MutexLock beginning(context->beginning());  // a pass that begins is found, or does not begin any more
    pass = context->pass();
    if (!pass || pass->id() != message.pass) {
      context->refuse_pass(message.pass, message.failure);
      pass = nullptr;
    }
  }
  if (!pass) return make_ready_future<Unit>();
  pass->fail(message.failure);
  return pass->told().then([](const Future<void>&) { return Unit{}; });
}

Future<void> AutogradExtension::Impl::release(std::uint64_t id) {
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
  std::erase_if(releases_, [](const auto& release) { return release.second.done(); });
  releases_.emplace(id, told);
  return told;
}

Future<void> AutogradExtension::Impl::released(std::uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = releases_.find(id);
  return found == releases_.end() ? make_ready_future<void>() : found->second;
}

void AutogradExtension::Impl::release_told(std::uint32_t, ReleaseContext message,
                                           Answer<ReleaseContext> answer) {
  const Future<void> told = release(message.context);
  if (told.done()) return answer.give(Unit{});
  told.add_done_callback([answer = std::make_shared<Answer<ReleaseContext>>(std::move(answer))](
                             const Future<void>&) { answer->give(Unit{}); });
}

Future<void> AutogradExtension::Impl::releases_under_way() {
  std::vector<Future<void>> all;
  MutexLock lock(mutex_);
  for (const auto& [context, release] : releases_) all.push_back(release);
  return when_all(std::move(all));
}

void AutogradExtension::Impl::warn_of_stray_gradients(const std::vector<at::Tensor>& parameters) {
  metrics_.counter("autograd.stray_gradients").add(parameters.size());
  std::string shapes;
  for (const at::Tensor& parameter : parameters)
    shapes += fmt::format("{}[{}]", shapes.empty() ? "" : ", ", fmt::join(parameter.sizes(), ", "));
  stray_gradients_.write(fmt::format(
      "in a distributed backward pass, a backward function or a hook ran LibTorch's engine, which "
      "put the gradients of {} parameters into .grad; the context does not have them, and its "
      "optimizers do not step by them. What a checkpoint computes again must take its parameters "
      "as detached inputs and give their gradients back (shapes: {})",
      parameters.size(), shapes));
}

void AutogradExtension::Impl::abort_all(const Error& error) {
  for (const auto& context : registry->all()) {
    if (auto pass = context->pass()) pass->fail_here(error);
  }
}

/// Passes need everybody; a context needs its maker, who ends it, and a way to hear of that. The
/// thread that brings the news has others to bring: it runs nothing of the user's, and no graph ends on it.
void AutogradExtension::Impl::depart(std::uint32_t rank, const Error& reason) {
  auto contexts = registry->all();
  for (const auto& context : contexts) {
    const bool dealt = context->workers().contains(rank), made = maker_of(context->id()) == rank;
    if (auto pass = context->pass()) {
      if (dealt || made || pass->root() == rank)
        pass->fail_without(rank, reason, "", PassState::Close::kOnPool);
      PassState::let_go(std::move(pass));
    }
  }
  const auto pool = host.lock();
  if (!pool) return;
  pool->post([self = shared_from_this(), contexts = std::move(contexts), rank] {
    if (self->worker.expired()) return;
    for (const auto& context : contexts) {
      if (context->workers().contains(rank) || maker_of(context->id()) == rank) self->lost_touch(context);
    }
  });
}

void AutogradExtension::Impl::lost_touch(const std::shared_ptr<ContextState>& context) {
  const Worker me = require_worker();
  const std::uint32_t maker = maker_of(context->id());
  if (maker == me.endpoint()->self().rank) return;
  const auto release_soon = [weak = weak_from_this(), id = context->id()] {
    const auto self = weak.lock();
    const auto pool = self ? self->host.lock() : nullptr;
    if (pool) pool->post([self, id] { static_cast<void>(self->release(id)); });
  };
  if (!me.endpoint()->is_present(maker)) return release_soon();
  const auto ask = std::make_shared<Telling<AdoptMember>>(me, maker, AdoptMember{context->id()},
                                                          [release_soon](bool known) {
                                                            if (!known) release_soon();
                                                          });
  static_cast<void>(ask->start());
}

bool AutogradExtension::Impl::adopt(const rpc::CallInfo& call, const AdoptMember& message) {
  auto context = registry->find(message.context);
  return context && context->add_worker(call.peer) != ContextState::Dealt::kEnded;
}

PartReport AutogradExtension::Impl::report_of(ContextState& context, std::uint64_t id) const {
  const Worker me = require_worker();
  auto pass = context.pass();
  if (pass && pass->id() == id) {
    const PartReport report = pass->report();
    PassState::let_go(std::move(pass));
    return report;
  }
  PartReport part;
  part.worker = me.name();
  if (const auto work = context.ended_pass(id)) {
    part.executed = work->executed;
    part.sent = work->sent;
    part.received = work->received;
    return part;
  }
  for (const auto& send : context.sends()) {
    const MessageInfo& message = send->message();
    part.waiting.push_back({message.id, message.call, message.site, message.reply,
                            me.endpoint()->name_of(message.peer), context.is_unanswered(message.id)});
  }
  return part;
}

Future<std::vector<PartReport>> AutogradExtension::Impl::ask_about(ContextState& context,
                                                                   const AskPass& question) const {
  auto heard = std::make_shared<Promise<std::vector<PartReport>>>(host);
  ask_all(require_worker(), context, question, {report_of(context, question.pass)}, silent_part,
          [heard](std::vector<PartReport> parts) { heard->set_value(std::move(parts)); });
  return heard->future();
}

void AutogradExtension::Impl::ask_pass(std::uint32_t, AskPass message, Answer<AskPass> answer) {
  auto context = registry->find(message.context);
  if (!context || !context->is_first_of(message.wave)) return answer.give({});
  ask_all(require_worker(), *context, message, {report_of(*context, message.pass)}, silent_part,
          [answer = std::make_shared<Answer<AskPass>>(std::move(answer))](
              const std::vector<PartReport>& parts) { answer->give(parts); });
}

void AutogradExtension::Impl::ask_graph(std::uint32_t, AskGraph message, Answer<AskGraph> answer) {
  auto context = registry->find(message.context);
  if (!context || !context->is_first_of(message.wave)) return answer.give({});
  const Worker me = require_worker();
  ask_all(me, *context, message, {graph_of(me, *context, {})}, silent_graph,
          [answer = std::make_shared<Answer<AskGraph>>(std::move(answer))](
              const std::vector<WorkerGraph>& graphs) { answer->give(graphs); });
}

ContextGraph AutogradExtension::Impl::graph(const std::shared_ptr<ContextState>& context,
                                            const std::vector<at::Tensor>& roots) {
  const Worker me = require_worker();
  const AskGraph question{context->id(), registry->next_id(), kPatience.count()};
  context->is_first_of(question.wave);
  auto heard = std::make_shared<Promise<std::vector<WorkerGraph>>>(host);
  ask_all(me, *context, question, {graph_of(me, *context, roots)}, silent_graph,
          [heard](std::vector<WorkerGraph> graphs) { heard->set_value(std::move(graphs)); });
  ContextGraph graph{context->id(), heard->future().wait()};
  std::sort(graph.workers.begin(), graph.workers.end(),
            [](const WorkerGraph& a, const WorkerGraph& b) { return a.rank < b.rank; });
  return graph;
}

}  // namespace torchspan::autograd
