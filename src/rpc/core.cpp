#include "rpc/core.h"

#include <algorithm>
#include <fmt/format.h>

namespace torchspan::rpc {

void Host::wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) {
  Executor& executor = pool_.executor();
  const Duration spin = executor.spin_limit();
  if (spin > Duration::zero()) {
    const TimePoint end = executor.now() + spin;
    while (!done.load(std::memory_order_acquire) && executor.now() < end) executor.yield();
  }
  pool_.wait(parker, done, deadline);
}

UniqueFunction<void()> Host::bind(UniqueFunction<void()> continuation) {
  const IncomingPtr& served = ServingScope::current();
  if (!served) return continuation;
  return [call = served, continuation = std::move(continuation)]() mutable {
    ServingScope serving(std::move(call));
    continuation();
  };
}

namespace {

PoolOptions pool_options(const ServiceOptions& options) {
  PoolOptions pool;
  pool.name = options.name;
  pool.threads = options.threads;
  pool.max_threads = options.max_threads;
  return pool;
}

}  // namespace

Core::Core(Runtime& runtime, FunctionTable functions, ServiceOptions options)
    : runtime_(runtime),
      functions_(std::move(functions)),
      options_(std::move(options)),
      self_{options_.name, options_.rank},
      roster_(self_),
      host_(std::make_shared<Host>(runtime.executor, pool_options(options_))),
      calls_(options_.max_pending_calls),
      serving_(options_.max_waiting_bytes),
      default_timeout_(options_.default_timeout) {}

void Core::open(const WorkerService::MakeTransport& make_transport) {
  references_ = std::make_shared<References>(weak_from_this(), self_.rank);
  worker_ = std::make_unique<Worker>(shared_from_this());
  install_handlers(*this);
  if (!make_transport) return;
  transport_ = make_transport(*this);
  if (!options_.listen.empty()) address_ = transport_->listen(options_.listen);
}

void Core::lead() {
  Executor& executor = runtime_.executor;
  const Duration spin = executor.spin_limit();
  TimePoint last = executor.now();
  while (!stopping_.load(std::memory_order_acquire)) {
    const bool busy = transport_->poll();
    fail_expired();
    timers_.run_due(executor.now());
    if (busy) {
      last = executor.now();
    } else if (spin > Duration::zero() && executor.now() - last < spin) {
      executor.yield();
    } else {
      transport_->wait(earlier(calls_.next_deadline(), timers_.next()));
    }
  }
}

void Core::watch_deadlines() {
  while (!stopping_.load(std::memory_order_acquire)) {
    fail_expired();
    timers_.run_due(runtime_.executor.now());
    timer_->park(earlier(calls_.next_deadline(), timers_.next()));
  }
}

void Core::wake_leader() {
  if (transport_) transport_->wake();
  if (timer_) timer_->unpark();
}

void Core::stop() {
  if (stopping_.exchange(true)) return;
  wake_leader();
  leader_.join();
  const Error reason(ErrorKind::kCancelled, "this worker is shutting down");
  if (links_) {
    for (const LinkMember& member : links_->present()) member_departed(member, reason);
  }
  for (const IncomingPtr& call : serving_.all()) call->request_stop();
  fail_calls(calls_.take_all(), reason);
  parked_.clear();
  if (links_) links_->close_all();
  if (transport_ && links_) transport_->poll();
  host_->pool().stop();
  references_->clear();
}

void Core::fail_expired() {
  for (PendingCall& call : calls_.take_expired(runtime_.executor.now())) {
    Error error(ErrorKind::kTimedOut,
                "no reply came before the deadline; the work may still happen over there");
    call.completion->fail(annotate(call, std::make_exception_ptr(error)));
  }
}

void Core::fail_calls(CallTable::Calls calls, const Error& reason) {
  for (PendingCall& call : calls) call.completion->fail(annotate(call, std::make_exception_ptr(reason)));
}

std::exception_ptr Core::annotate(const PendingCall& call, const std::exception_ptr& cause) const {
  const Error plain = to_error(cause);
  std::string text = plain.message();
  // A failure that was told once, of the creation that this call uses, keeps its own worker and call.
  const bool told = !plain.call().empty();
  const std::string site = call.user_values ? site_text(call.site) : "";
  if (!site.empty()) text += fmt::format(" [{} at {}]", told ? "used" : "called", site);
  Error error(plain.kind(), std::move(text));
  error.with_worker(told ? plain.worker() : roster_.name(call.peer))
      .with_call(told ? plain.call() : call.name);
  error.with_elapsed(runtime_.executor.now() - call.started);
  for (const RemoteFrame& frame : plain.frames()) error.with_frame(frame);
  return std::make_exception_ptr(error);
}

std::uint64_t Core::id_of(const char* name, std::string (*signature)()) const {
  const std::string text = signature();
  const std::uint64_t id = function_id(name, text);
  if (functions_.find(id) != nullptr) return id;
  throw Error(
      ErrorKind::kInvalid,
      functions_.contains(name)
          ? fmt::format("the function table's '{}' has another signature than this token's {}", name, text)
          : fmt::format("'{}' is not in this worker's function table; add its token to the FunctionTable in "
                        "main(), on every worker",
                        name));
}

void Core::apply(const CallOptions& options, Request& request) {
  const Duration timeout = options.timeout.value_or(default_timeout_.load());
  if (timeout < Duration::zero()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("a timeout of {} ns is negative; zero means without limit", timeout.count()));
  }
  if (timeout != Duration::zero()) request.deadline = runtime_.executor.deadline_in(timeout);
  request.stop = options.stop;
  const IncomingPtr& served = ServingScope::current();
  if (!served || options.detached) return;
  request.deadline = earlier(request.deadline, served->deadline);
  request.inherited_stop = stop_token_of(served);
}

std::optional<CurrentCall> Core::current_call() {
  const IncomingPtr& served = ServingScope::current();
  if (!served) return std::nullopt;
  return CurrentCall{
      {roster_.name(served->peer), served->peer}, served->name, served->deadline, stop_token_of(served)};
}

std::stop_token Core::stop_token_of(const IncomingPtr& served) {
  bool fresh = false;
  std::stop_token token = served->stop_token(&fresh);
  if (!fresh || served->deadline.is_never()) return token;
  const auto timer = timers_.at(served->deadline, [weak = std::weak_ptr<IncomingCall>(served)] {
    if (auto call = weak.lock()) call->request_stop();
  });
  serving_.set_stop_timer(*served, timer.id);
  if (timer.earliest) wake_leader();
  return token;
}

DebugInfo Core::debug() const {
  const TimePoint now = runtime_.executor.now();
  DebugInfo info;
  info.worker = self_.name;
  info.pending = calls_.describe(now);
  for (auto& call : info.pending) call.to = roster_.name(static_cast<std::uint32_t>(std::stoul(call.to)));
  info.serving = serving_.describe(now);
  for (auto& call : info.serving) call.from = roster_.name(static_cast<std::uint32_t>(std::stoul(call.from)));
  const RRefTable::Counts counts = references_->counts();
  info.references = {counts.owners, counts.forks, counts.pending_users, counts.pending_children};
  info.pool_threads = host_->pool().thread_count();
  info.pool_queued = host_->pool().queued();
  info.calls_sent = sent_.load();
  info.calls_handled = handled_.load();
  info.late_replies = late_replies_.load();
  return info;
}

void Core::after(Duration delay, UniqueFunction<void()> job) {
  auto posted = [host = host_, job = std::move(job)]() mutable { host->post(std::move(job)); };
  if (timers_.at(runtime_.executor.deadline_in(delay), std::move(posted)).earliest) wake_leader();
}

void* Core::find_extension(const std::type_info& type) const {
  auto it = extensions_.find(type);
  if (it != extensions_.end()) return dynamic_cast<void*>(it->second.get());
  throw Error(ErrorKind::kInvalid,
              fmt::format("worker '{}' has no extension {}; add one to its Session (or to the "
                          "WorkerService) when it is made",
                          self_.name, demangle(type)));
}

ReferencePtr Core::own(ValuePtr value, std::string type_name, SourceLocation) {
  return references_->own(std::move(value), wire::digest(type_name));
}

Totals Core::totals() const {
  return {sent_.load(), handled_.load(),
          calls_.size() != 0 || running_.load() != 0 || host_->pool().busy() || !references_->settled()};
}

void Core::on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  const auto peer = links_->closed(channel.get());
  std::erase_if(parked_, [&](const Parked& parked) { return parked.channel == channel; });
  if (!peer) {
    runtime_.log.info(fmt::format("a connection from {} closed before it said who it was: {}",
                                  channel->peer(), reason.what()));
    return;
  }
  for (const IncomingPtr& call : serving_.of_channel(channel.get())) call->request_stop();
  auto calls = calls_.take_channel(channel.get());
  if (!stopping_.load() && links_->is_present(*peer)) references_->on_broken(*peer);
  if (calls.empty()) return;
  Error error(reason.kind(),
              fmt::format("the connection to worker '{}' (rank {}) ended: {}; it died, or it left",
                          roster_.name(*peer), *peer, reason.message()));
  fail_calls(std::move(calls), error);
}

void Core::protocol_error(const std::shared_ptr<net::Channel>& channel, const Error& error) {
  runtime_.log.warning(fmt::format("closing the connection to {}: {}", channel->peer(), error.what()));
  channel->close();
}

}  // namespace torchspan::rpc
