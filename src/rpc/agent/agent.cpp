#include "rpc/agent/agent.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <torchspan/detail/rpc/service.h>

#include "core/api/throw_invalid.h"
#include "rpc/agent/graceful_shutdown.h"
#include "rpc/calls/handlers.h"

namespace torchspan::rpc {
namespace {

Peer to_peer(const rendezvous::Member& member) {
  return {{member.name, static_cast<std::uint32_t>(member.rank)},
          member.address,
          member.instance,
          member.incarnation,
          {member.pid, member.start_ticks},
          member.wire};
}

void throw_leaks(const std::string& worker, const std::vector<RRefInfo>& leaks) {
  if (leaks.empty()) return;
  std::string text = fmt::format(
      "worker '{}' was shut down while others referred to {} of its values (strict_leaks); release these "
      "RRefs before shutdown():",
      worker, leaks.size());
  for (const std::string& line : leak_lines(leaks)) text += "\n  " + line;
  throw_invalid(text);
}

}  // namespace

/// Gives an extension access to the agent while the extension is attached.
class RpcAgent::ExtensionRegistrar final : public Registrar {
 public:
  explicit ExtensionRegistrar(RpcAgent& agent) : agent_(agent) {}
  Worker& worker() override { return agent_.worker(); }
  Runtime& runtime() override { return agent_.runtime(); }
  std::weak_ptr<ContinuationExecutor> continuations() override { return agent_.continuations(); }
  void intercept(Interceptor& interceptor) override { agent_.state_.interceptors.push_back(&interceptor); }
  void on_departure(std::function<void(std::uint32_t, const Error&)> callback) override {
    agent_.departure_callbacks_.push_back(std::move(callback));
  }
  void on_shutdown(std::function<Future<void>()> callback) override {
    agent_.shutdown_hooks_.push_back(std::move(callback));
  }
  void handle_raw(wire::MessageType type, std::string name, RunOn where, RawHandler handler) override {
    agent_.server_.add_handler(type, {std::move(name), where, false,
                                      [handler = std::move(handler)](
                                          const IncomingPtr& call, const std::shared_ptr<Completion>& reply) {
                                        handler(call->info, call->payload, reply);
                                      }});
  }

 private:
  RpcAgent& agent_;
};

RpcAgent::RpcAgent(std::shared_ptr<Runtime> runtime, FunctionTable functions, ServiceOptions options)
    : state_(std::move(runtime), std::move(functions), std::move(options)),
      loop_(state_.runtime, state_.calls, server_,
            {.fail_expired = [this] { calls_.fail_expired(); },
             .poll_devices =
                 [this] {
                   sender_.copying().poll_copies();
                   if (state_.device_memory) state_.device_memory->send_returns();
                 }}),
      sender_(
          state_, loop_, [this](ReceivedMessage message) { receiver_.deliver_here(std::move(message)); },
          [this](const auto& channel, const Error& error) { receiver_.break_channel(channel, error); }),
      stopped_peers_(state_, loop_, calls_),
      calls_(state_, loop_, sender_, stopped_peers_),
      server_(state_, loop_, sender_),
      receiver_(state_, loop_, calls_, server_),
      default_timeout_(state_.options.default_timeout) {}

void RpcAgent::open(const WorkerService::MakeTransport& make_transport) {
  state_.backend = weak_from_this();
  state_.references = std::make_shared<References>(weak_from_this(), state_.self.rank);
  state_.device_memory = DeviceMemory::make(state_, [this](Duration delay, UniqueFunction<void()> job) {
    loop_.at(state_.runtime.executor.deadline_in(delay), std::move(job));
  });
  worker_ = std::make_unique<Worker>(shared_from_this());
  state_.continuations->set_driver(std::shared_ptr<TransportLoop>(shared_from_this(), &loop_));
  install_handlers(*this);
  install_device_memory(*this, state_.device_memory);
  if (!make_transport) return;
  transport_ = make_transport(receiver_);
  if (!state_.options.listen.empty()) address_ = transport_->listen(state_.options.listen);
}

void RpcAgent::attach(std::vector<std::unique_ptr<Extension>> extensions) {
  ExtensionRegistrar registrar(*this);
  for (auto& extension : extensions) {
    Extension& one = *extension;
    const auto [it, fresh] = extensions_.emplace(typeid(one), std::move(extension));
    if (!fresh) {
      throw_invalid("extension {} was given twice", demangle(typeid(one)));
    }
    one.attach(registrar);
  }
}

void RpcAgent::start(std::unique_ptr<rendezvous::Membership> membership) {
  membership_ = std::move(membership);
  stopped_peers_.start(membership_);
  const rendezvous::Member& self = membership_->self();
  state_.self = {self.name, static_cast<std::uint32_t>(self.rank)};
  state_.instance = self.instance;
  state_.incarnation = self.incarnation;
  state_.wire = self.wire;
  open_world_ = membership_->open();
  state_.references->begin(state_.id());
  state_.peers.begin(to_peer(self));
  if (transport_) join_world(self);
  loop_.start(transport_.get(), state_.self.name);
  if (!transport_) return;
  membership_->watch(
      {.joined = [this](const rendezvous::Member& member) { member_joined(member); },
       .died = [this](const rendezvous::Member& member,
                      const Error& reason) { member_departed(to_peer(member), reason); },
       .left =
           [this](const rendezvous::Member& member) {
             member_departed(
                 to_peer(member),
                 Error(ErrorKind::kDisconnected, fmt::format("worker '{}' has left the world", member.name)));
           }});
}

void RpcAgent::join_world(const rendezvous::Member& self) {
  state_.channels =
      std::make_unique<PeerChannels>(*transport_, state_.runtime.executor, state_.peers, to_peer(self));
  for (const rendezvous::Member& member : membership_->members()) {
    if (member.rank == self.rank) continue;
    state_.references->joined(to_peer(member).id());
    state_.peers.add(to_peer(member));
  }
  if (!open_world_) state_.devices.check_names(state_.peers.members());
}

void RpcAgent::member_joined(const rendezvous::Member& member) {
  const Peer peer = to_peer(member);
  if (peer.info.rank == state_.self.rank || state_.peers.knows(peer)) return;
  state_.references->joined(peer.id());
  state_.channels->close(peer.info.rank);
  state_.peers.add(peer);
  if (state_.runtime.log.enabled(LogLevel::kDebug))
    state_.runtime.log.debug(fmt::format("worker '{}' (rank {}) joined the world", member.name, member.rank));
  loop_.at(Deadline(state_.runtime.executor.now()), [this] { receiver_.unknown_peers().admit(); });
  loop_.wake();
}

void RpcAgent::member_departed(const Peer& member, const Error& reason) {
  const std::uint32_t rank = member.info.rank;
  if (rank == state_.self.rank || !state_.peers.depart(member, reason)) return;
  state_.channels->close(rank);
  if (state_.runtime.log.enabled(LogLevel::kDebug)) {
    state_.runtime.log.debug(
        fmt::format("worker '{}' (rank {}) is gone: {}", member.info.name, rank, reason.message()));
  }
  calls_.fail(state_.calls.take_peer(rank), reason);
  for (const IncomingPtr& call : state_.serving.all()) {
    if (call->peer == rank) call->request_stop();
  }
  state_.references->departed(member.id());
  sender_.departed(member.id());
  if (state_.device_memory) state_.device_memory->departed(member.id(), member.process);
  for (const auto& callback : departure_callbacks_) callback(rank, reason);
  if (open_world_) state_.peers.forget(rank);
}

void RpcAgent::shutdown(Deadline deadline) {
  state_.runtime.check_process();
  if (shut_down_.exchange(true) || state_.stopping.load()) return;
  const GracefulShutdown::Outcome outcome =
      GracefulShutdown(state_, membership_, shutdown_hooks_).run(deadline);
  stop(outcome.last_lines);
  if (outcome.failure) throw Error(*outcome.failure);
  throw_leaks(state_.self.name, outcome.leaks);
}

void RpcAgent::stop(const std::string& why) {
  state_.runtime.check_process();
  if (state_.stopping.exchange(true)) return;
  if (membership_) membership_->give_up(why);
  loop_.stop();
  const Error reason(ErrorKind::kCancelled, "this worker is shutting down");
  if (state_.channels) {
    for (const Peer& member : state_.peers.all_present()) member_departed(member, reason);
  }
  for (const IncomingPtr& call : state_.serving.all()) call->request_stop();
  calls_.fail(state_.calls.take_all(), reason);
  if (state_.channels) {
    state_.channels->close_all();
    loop_.drain();
    receiver_.unknown_peers().clear();
  }
  stop_pool();
  sender_.copying().drop();
  state_.references->clear();
}

/// Waits for the handlers that still run, because nothing can end them.
void RpcAgent::stop_pool() {
  Executor& executor = state_.runtime.executor;
  const std::unique_ptr<Parker> done = executor.make_parker();
  Thread reporter;
  const auto end = [&](Parker* parker) {
    parker->unpark();
    reporter.join();
  };
  const std::unique_ptr<Parker, decltype(end)> until_the_end(done.get(), end);
  if (const auto calls = state_.serving.describe(executor.now(), state_.peers);
      std::any_of(calls.begin(), calls.end(), [](const auto& call) { return call.begun; })) {
    try {
      reporter = executor.spawn(state_.self.name + "/stop", [&] {
        ShutdownWait wait(state_.runtime, "stop()");
        while (!done->park(executor.deadline_in(ShutdownWait::kEvery))) wait.warn(unfinished_work(state_));
      });
    } catch (const Error&) {  // the system has no thread left: nothing reports what this waits for
    }
  }
  state_.continuations->pool().stop();
}

void RpcAgent::release() {
  std::shared_ptr<rendezvous::Membership> membership;
  {
    MutexLock lock(membership_mutex_);
    membership.swap(membership_);
  }
  stopped_peers_.end();
  membership.reset();
  worker_.reset();
}

std::vector<WorkerInfo> RpcAgent::workers() const {
  state_.runtime.check_process();
  return state_.peers.members();
}

WorkerInfo RpcAgent::info(const Destination& of) const {
  state_.runtime.check_process();
  return state_.peers.info(of);
}

GlobalId RpcAgent::next_id() {
  state_.runtime.check_process();
  return state_.references->next_id();
}

std::uint32_t RpcAgent::resolve(const Destination& to) const {
  state_.runtime.check_process();
  try {
    return state_.peers.resolve(to);
  } catch (const Error&) {
    if (!is_stopping()) throw;
    throw shut_down();  // this worker is stopping, so the others are gone
  }
}

std::uint64_t RpcAgent::id_of(const char* name, std::string (*signature)()) const {
  const FunctionEntry* named = state_.functions.find_named(name);
  if (named != nullptr && named->describe == signature) return named->id;
  const std::string text = signature();
  const std::uint64_t id = function_id(name, text);
  if (state_.functions.find(id) != nullptr) return id;
  throw_invalid(
      named != nullptr
          ? fmt::format("the function table's '{}' has another signature than this token's {}", name, text)
          : fmt::format("'{}' is not in this worker's function table; add its token to the FunctionTable in "
                        "main(), on every worker",
                        name));
}

void RpcAgent::apply(const CallOptions& options, Request& request) {
  state_.runtime.check_process();
  const Duration timeout = options.timeout.value_or(default_timeout_.load());
  if (timeout < Duration::zero()) {
    throw_invalid("a timeout of {} ns is negative; zero means no limit", timeout.count());
  }
  if (timeout != Duration::zero()) request.deadline = state_.runtime.executor.deadline_in(timeout);
  request.stop = options.stop;
  const IncomingPtr& served = Environment::served();
  request.no_grad = options.no_grad || (served && served->info.no_grad && !at::GradMode::is_enabled());
  if (!served || options.detached) return;
  request.deadline = earlier(request.deadline, served->deadline);
  request.inherited_stop = server_.stop_token_of(served);
}

std::optional<CurrentCall> RpcAgent::current_call() {
  const IncomingPtr& served = Environment::served();
  if (!served) return std::nullopt;
  return CurrentCall{{state_.peers.name(served->peer), served->peer},
                     served->name,
                     served->deadline,
                     server_.stop_token_of(served)};
}

DebugInfo RpcAgent::debug() const {
  state_.runtime.check_process();
  const TimePoint now = state_.runtime.executor.now();
  DebugInfo info;
  info.worker = state_.self.name;
  info.pending = state_.calls.describe(now, state_.peers);
  info.serving = state_.serving.describe(now, state_.peers);
  const RRefTable::Counts counts = state_.references->counts();
  info.list_rrefs_ = [references = std::weak_ptr<const References>(state_.references)] {
    const auto alive = references.lock();
    return alive ? alive->list() : std::vector<RRefInfo>();
  };
  info.references = {counts.owners, counts.forks, counts.pending_users, counts.pending_children};
  info.pool_threads = state_.continuations->pool().thread_count();
  info.pool_queued = state_.continuations->pool().queued();
  info.calls_sent = state_.sent.load();
  info.calls_handled = state_.handled.load();
  info.late_replies = receiver_.late_replies();
  return info;
}

void RpcAgent::after(Duration delay, UniqueFunction<void()> job) {
  state_.runtime.check_process();
  loop_.after(delay, state_.continuations, std::move(job));
}

void RpcAgent::send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion) {
  if (!state_.runtime.executor.process().is_current())
    return completion->fail(std::make_exception_ptr(OwnerProcess::forked(state_.self.name)));
  calls_.send(to, std::move(request), std::move(completion));
}

ReferencePtr RpcAgent::own(ValuePtr value, std::string type_name, SourceLocation site) {
  state_.runtime.check_process();
  return state_.references->own(std::move(value), type_name, site);
}

ReferencePtr RpcAgent::create(std::uint32_t to, Request request, std::string type_name) {
  state_.runtime.check_process();
  return calls_.create(to, std::move(request), type_name);
}

void* RpcAgent::find_extension(const std::type_info& type) const {
  state_.runtime.check_process();
  auto it = extensions_.find(type);
  if (it != extensions_.end()) return dynamic_cast<void*>(it->second.get());
  throw_invalid(
      "worker '{}' has no extension {}; add one to its Session (or to the WorkerService) when it is made",
      state_.self.name, demangle(type));
}

Gathering RpcAgent::gathering(const std::vector<std::string>& participants) {
  state_.runtime.check_process();
  Gathering who;
  {
    MutexLock lock(membership_mutex_);
    who.membership = membership_;
  }
  if (is_stopping() || !who.membership) throw shut_down();
  std::vector<int>& asked = who.asked;
  for (const std::string& name : participants) asked.push_back(static_cast<int>(resolve(name)));
  if (asked.empty() && who.membership->open()) {
    throw_invalid("an open world has no fixed set of workers: name the participants");
  }
  if (asked.empty()) {
    for (const WorkerInfo& worker : state_.peers.members()) asked.push_back(static_cast<int>(worker.rank));
  }
  const std::set<int> sorted(asked.begin(), asked.end());
  who.ranks.assign(sorted.begin(), sorted.end());
  return who;
}

class WorkerService::Impl {
 public:
  std::shared_ptr<RpcAgent> agent;
};

WorkerService::WorkerService(Runtime& runtime, FunctionTable functions, ServiceOptions options,
                             MakeTransport make_transport, std::vector<std::unique_ptr<Extension>> extensions)
    : WorkerService(std::shared_ptr<Runtime>(std::shared_ptr<void>(), &runtime), std::move(functions),
                    std::move(options), std::move(make_transport), std::move(extensions)) {}

WorkerService::WorkerService(std::shared_ptr<Runtime> runtime, FunctionTable functions,
                             ServiceOptions options, MakeTransport make_transport,
                             std::vector<std::unique_ptr<Extension>> extensions)
    : impl_(std::make_unique<Impl>()) {
  impl_->agent = make_process_shared<RpcAgent>(std::move(runtime), std::move(functions), std::move(options));
  impl_->agent->open(make_transport);
  impl_->agent->attach(std::move(extensions));
}

WorkerService::~WorkerService() {
  if (!impl_->agent->runtime().executor.process().is_current()) return;
  try {
    stop();
    impl_->agent->release();
  } catch (...) {
    impl_->agent->runtime().log.error(
        fmt::format("this worker could not be stopped when its Session or WorkerService was destroyed, and "
                    "stays in memory; destroy the object on a thread that the program started: {}",
                    describe(std::current_exception()).text));
    impl_->agent->keep_alive();  // its threads still use it
  }
}

const std::string& WorkerService::address() const { return impl_->agent->address(); }
void WorkerService::start(std::unique_ptr<rendezvous::Membership> membership) {
  impl_->agent->start(std::move(membership));
}
rendezvous::Membership& WorkerService::membership() { return impl_->agent->membership(); }
Worker& WorkerService::worker() { return impl_->agent->worker(); }
void WorkerService::shutdown(Deadline deadline) { impl_->agent->shutdown(deadline); }
void WorkerService::stop(const std::string& why) { impl_->agent->stop(why); }

}  // namespace torchspan::rpc
