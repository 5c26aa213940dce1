#include "rpc/agent.h"

#include <algorithm>
#include <fmt/format.h>

namespace torchspan::rpc {

namespace {
/// How often a waiting caller polls in vain before it lets others have its core: the peer may be among them.
constexpr unsigned kPollsPerYield = 8;

/// Says to the driver for how long a caller drives.
class Driving {
 public:
  Driving(Driver* driver, const std::atomic<bool>& done) : driver_(driver), done_(done) {
    if (driver_ != nullptr) driver_->begin_driving();
  }
  ~Driving() {
    if (driver_ != nullptr) driver_->end_driving(!done_.load(std::memory_order_acquire));
  }
  Driving(const Driving&) = delete;

 private:
  Driver* const driver_;
  const std::atomic<bool>& done_;
};
}  // namespace

void Host::wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) {
  Executor& executor = pool_.executor();
  const auto driver = driver_.lock();
  if (driver) driver->check_may_wait();
  const Duration spin = executor.spin_limit();
  if (spin > Duration::zero()) {
    const TimePoint end = executor.now() + spin;
    const Driving driving(driver.get(), done);
    for (unsigned idle = 0; !done.load(std::memory_order_acquire) && executor.now() < end;) {
      if (driver && driver->drive()) {
        idle = 0;
      } else if (!driver || ++idle % kPollsPerYield == 0) {
        executor.yield();
        if (executor.spin_limit() == Duration::zero()) break;
      }
    }
  }
  pool_.wait(parker, done, deadline);
}

UniqueFunction<void()> Host::bind(UniqueFunction<void()> continuation) {
  return [environment = Environment::capture(), continuation = std::move(continuation)]() mutable {
    const EnvironmentScope scope(environment);
    std::exchange(continuation, nullptr)();  // what it captured ends in the scope, too
  };
}

namespace {

/// How long the leader stands aside for callers that drive, before it looks again.
constexpr Duration kAside = std::chrono::microseconds(200);
/// What a function declared kInline may take, the time included for which others have its core.
constexpr Duration kShort = std::chrono::milliseconds(10);
/// What a long run counts for, against one for each short run after it, and what moves a function to the
/// pool: three long runs in a row do, a long one now and then, when others took the core, does not.
constexpr int kLongRun = 8, kTooLong = 17;

PoolOptions pool_options(const ServiceOptions& options) {
  PoolOptions pool;
  pool.name = options.name;
  pool.threads = options.threads;
  pool.max_threads = options.max_threads;
  return pool;
}

}  // namespace

RpcAgent::RpcAgent(std::shared_ptr<Runtime> runtime, FunctionTable functions, ServiceOptions options)
    : runtime_owner_(std::move(runtime)),
      functions_(std::move(functions)),
      options_(std::move(options)),
      devices_({options_.name, options_.rank}, options_.device_maps),
      self_{options_.name, options_.rank},
      roster_(self_),
      host_(std::make_shared<Host>(runtime_owner_, pool_options(options_))),
      calls_(options_.max_pending_calls),
      serving_(options_.max_waiting_bytes),
      default_timeout_(options_.default_timeout) {
  devices_.check_here();
}

void RpcAgent::open(const WorkerService::MakeTransport& make_transport) {
  references_ = std::make_shared<References>(weak_from_this(), self_.rank);
  worker_ = std::make_unique<Worker>(shared_from_this());
  leader_parker_ = runtime_.executor.make_parker();
  host_->set_driver(std::static_pointer_cast<RpcAgent>(shared_from_this()));
  install_handlers(*this);
  if (!make_transport) return;
  transport_ = make_transport(*this);
  if (!options_.listen.empty()) address_ = transport_->listen(options_.listen);
}

void RpcAgent::lead() {
  Executor& executor = runtime_.executor;
  TimePoint last = executor.now();
  while (!stopping_.load(std::memory_order_acquire)) {
    const bool busy = lead_once();
    fail_expired();
    timers_.run_due(executor.now());
    const Duration spin = executor.spin_limit();
    if (busy) {
      last = executor.now();
    } else if (spin > Duration::zero() && drivers_.load(std::memory_order_relaxed) > 0) {
      aside_.store(true);
      leader_parker_->park(executor.deadline_in(kAside));
      aside_.store(false);
      last = executor.now();
    } else if (spin > Duration::zero() && executor.now() - last < spin) {
      executor.yield();
    } else {
      rest_in_transport();
    }
  }
}

bool RpcAgent::lead_once() {
  InlineCalls calls;
  bool busy = false;
  {
    DriverLockGuard hold(driver_lock_, runtime_.executor);
    busy = transport_->poll();
    calls.swap(inline_calls_);
  }
  for (const auto& [call, entry] : calls) run_inline(call, *entry);
  return busy;
}

void RpcAgent::rest_in_transport() {
  leader_until_.store(TimePoint::max());  // a deadline that comes now wakes, even if we count it below
  const Deadline until = earlier(calls_.next_deadline(), timers_.next());
  leader_until_.store(until.at());
  if (!stopping_.load()) {
    DriverLockGuard hold(driver_lock_, runtime_.executor);
    transport_->wait(until);
  }
  leader_until_.store(TimePoint::min());
}

void RpcAgent::run_inline(const IncomingPtr& call, const Entry& entry) {
  const TimePoint begin = runtime_.executor.now();
  call->inline_thread.store(std::this_thread::get_id());
  run(call, entry);
  call->inline_thread.store({});
  const Duration took = runtime_.executor.now() - begin;
  if (took <= kShort && long_runs_.empty()) return;
  const std::uint64_t id = ByteReader(call->frame.value).get<std::uint64_t>();
  if (took <= kShort) {
    if (const auto found = long_runs_.find(id); found != long_runs_.end() && --found->second == 0)
      long_runs_.erase(found);
    return;
  }
  if ((long_runs_[id] += kLongRun) < kTooLong) return;
  long_runs_.erase(id);
  DriverLockGuard hold(driver_lock_, runtime_.executor);
  if (!not_short_.insert(id).second) return;
  runtime_.log.warning(fmt::format(
      "function '{}' is declared kInline but took {:.3f} ms; it is served on the pool from now on",
      call->name, std::chrono::duration<double, std::milli>(took).count()));
}

bool RpcAgent::is_inline(const IncomingCall& call) {
  if (call.info.type != kCallFunction || !call.channel || !call.payload.references.empty()) return false;
  if (call.frame.value.size() < sizeof(std::uint64_t)) return false;
  const std::uint64_t id = ByteReader(call.frame.value).get<std::uint64_t>();
  const FunctionEntry* function = functions_.find(id);
  return function != nullptr && function->serve == torchspan::Serve::kInline && !not_short_.contains(id);
}

bool RpcAgent::drive() {
  if (stopping_.load(std::memory_order_relaxed) || !links_) return false;
  InlineCalls calls;
  bool busy = false;
  {
    const DriverLockGuard hold(driver_lock_);
    if (!hold.held() || stopping_.load()) return false;
    struct ByCaller {
      bool& flag;
      explicit ByCaller(bool& driven) : flag(driven) { flag = true; }
      ~ByCaller() { flag = false; }
    } const by_caller(driven_by_caller_);
    busy = transport_->poll();
    calls.swap(inline_calls_);
  }
  for (const auto& [call, entry] : calls) {
    host_->post([self = std::static_pointer_cast<RpcAgent>(shared_from_this()), call = call, entry = entry] {
      self->run(call, *entry);
    });
  }
  return busy;
}

void RpcAgent::end_driving(bool unserved) {
  drivers_.fetch_sub(1, std::memory_order_relaxed);
  if (unserved && aside_.load()) leader_parker_->unpark();
}

void RpcAgent::check_may_wait() const {
  const IncomingPtr& served = Environment::served();
  // Continuations run in the environment of the call that added them, but on threads of the pool.
  if (!served || served->inline_thread.load() != std::this_thread::get_id()) return;
  throw Error(
      ErrorKind::kInvalid,
      "a function declared kInline waits for a future, on the thread that would bring it; declare it without "
      "kInline, or make it a coroutine");
}

void RpcAgent::watch_deadlines() {
  while (!stopping_.load(std::memory_order_acquire)) {
    fail_expired();
    timers_.run_due(runtime_.executor.now());
    leader_until_.store(TimePoint::max());
    const Deadline until = earlier(calls_.next_deadline(), timers_.next());
    leader_until_.store(until.at());
    timer_->park(until);
    leader_until_.store(TimePoint::min());
  }
}

void RpcAgent::wake_leader_by(Deadline deadline) {
  if (deadline.at() < leader_until_.load()) wake_leader();
}

void RpcAgent::wake_leader() {
  if (transport_) transport_->wake();
  if (timer_) timer_->unpark();
}

void RpcAgent::stop(const std::string& why) {
  if (stopping_.exchange(true)) return;
  if (membership_) membership_->give_up(why);
  wake_leader();
  leader_.join();
  const Error reason(ErrorKind::kCancelled, "this worker is shutting down");
  if (links_) {
    for (const LinkMember& member : links_->present()) member_departed(member, reason);
  }
  for (const IncomingPtr& call : serving_.all()) call->request_stop();
  fail_calls(calls_.take_all(), reason);
  close_transport();
  stop_pool();
  references_->clear();
}

void RpcAgent::close_transport() {
  if (!links_) return;
  std::vector<Parked> parked;
  InlineCalls calls;
  links_->close_all();
  {
    // A waiting caller may still drive; it finds stopping_ set when it takes the driver lock next.
    DriverLockGuard hold(driver_lock_, runtime_.executor);
    transport_->poll();
    parked.swap(parked_);
    calls.swap(inline_calls_);
  }
}

void RpcAgent::release() {
  std::shared_ptr<rendezvous::Membership> membership;
  {
    MutexLock lock(membership_mutex_);
    membership.swap(membership_);
  }
  membership.reset();
  worker_.reset();
}

std::uint32_t RpcAgent::resolve(const Destination& to) const {
  try {
    return roster_.resolve(to);
  } catch (const Error&) {
    if (!is_stopping()) throw;
    throw shut_down();  // the others are gone because this worker is
  }
}

void RpcAgent::fail_expired() {
  for (PendingCall& call : calls_.take_expired(runtime_.executor.now())) {
    Error error(ErrorKind::kTimedOut,
                "no reply came before the deadline; the work may still happen over there");
    call.completion->fail(annotate(call, std::make_exception_ptr(error)));
  }
}

void RpcAgent::fail_calls(CallTable::Calls calls, const Error& reason) {
  for (PendingCall& call : calls) call.completion->fail(annotate(call, std::make_exception_ptr(reason)));
}

std::exception_ptr RpcAgent::annotate(const PendingCall& call, const std::exception_ptr& cause) const {
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

std::uint64_t RpcAgent::id_of(const char* name, std::string (*signature)()) const {
  const FunctionEntry* named = functions_.find_named(name);
  if (named != nullptr && named->describe == signature) return named->id;
  const std::string text = signature();
  const std::uint64_t id = function_id(name, text);
  if (functions_.find(id) != nullptr) return id;
  throw Error(
      ErrorKind::kInvalid,
      named != nullptr
          ? fmt::format("the function table's '{}' has another signature than this token's {}", name, text)
          : fmt::format("'{}' is not in this worker's function table; add its token to the FunctionTable in "
                        "main(), on every worker",
                        name));
}

void RpcAgent::apply(const CallOptions& options, Request& request) {
  const Duration timeout = options.timeout.value_or(default_timeout_.load());
  if (timeout < Duration::zero()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("a timeout of {} ns is negative; zero means without limit", timeout.count()));
  }
  if (timeout != Duration::zero()) request.deadline = runtime_.executor.deadline_in(timeout);
  request.stop = options.stop;
  const IncomingPtr& served = Environment::served();
  request.no_grad = options.no_grad || (served && served->info.no_grad && !at::GradMode::is_enabled());
  if (!served || options.detached) return;
  request.deadline = earlier(request.deadline, served->deadline);
  request.inherited_stop = stop_token_of(served);
}

std::optional<CurrentCall> RpcAgent::current_call() {
  const IncomingPtr& served = Environment::served();
  if (!served) return std::nullopt;
  return CurrentCall{
      {roster_.name(served->peer), served->peer}, served->name, served->deadline, stop_token_of(served)};
}

std::stop_token RpcAgent::stop_token_of(const IncomingPtr& served) {
  bool fresh = false;
  std::stop_token token = served->stop_token(&fresh);
  if (!fresh || served->deadline.is_never()) return token;
  const auto timer = timers_.at(served->deadline, [weak = std::weak_ptr<IncomingCall>(served)] {
    if (auto call = weak.lock()) call->request_stop();
  });
  serving_.set_stop_timer(*served, timer.id);
  if (timer.earliest) wake_leader_by(served->deadline);
  return token;
}

DebugInfo RpcAgent::debug() const {
  const TimePoint now = runtime_.executor.now();
  DebugInfo info;
  info.worker = self_.name;
  info.pending = calls_.describe(now, roster_);
  info.serving = serving_.describe(now, roster_);
  const RRefTable::Counts counts = references_->counts();
  info.list_rrefs = [references = std::weak_ptr<const References>(references_)] {
    const auto alive = references.lock();
    return alive ? alive->list() : std::vector<RRefInfo>();
  };
  info.references = {counts.owners, counts.forks, counts.pending_users, counts.pending_children};
  info.pool_threads = host_->pool().thread_count();
  info.pool_queued = host_->pool().queued();
  info.calls_sent = sent_.load();
  info.calls_handled = handled_.load();
  info.late_replies = late_replies_.load();
  return info;
}

void RpcAgent::after(Duration delay, UniqueFunction<void()> job) {
  auto posted = [host = host_, job = std::move(job)]() mutable { host->post(std::move(job)); };
  const Deadline when = runtime_.executor.deadline_in(delay);
  if (timers_.at(when, std::move(posted)).earliest) wake_leader_by(when);
}

void* RpcAgent::find_extension(const std::type_info& type) const {
  auto it = extensions_.find(type);
  if (it != extensions_.end()) return dynamic_cast<void*>(it->second.get());
  throw Error(ErrorKind::kInvalid,
              fmt::format("worker '{}' has no extension {}; add one to its Session (or to the "
                          "WorkerService) when it is made",
                          self_.name, demangle(type)));
}

ReferencePtr RpcAgent::own(ValuePtr value, std::string type_name, SourceLocation site) {
  return references_->own(std::move(value), type_name, site);
}

Totals RpcAgent::totals() const {
  return {sent_.load(), handled_.load(),
          calls_.size() != 0 || running_.load() != 0 || host_->pool().busy() || !references_->settled()};
}

void RpcAgent::on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  const bool shut = links_->is_shut(channel.get());
  const auto peer = links_->closed(channel.get());
  if (shut) return;
  std::erase_if(parked_, [&](const Parked& parked) { return parked.channel == channel; });
  if (driven_by_caller_) {
    return host_->post([self = std::static_pointer_cast<RpcAgent>(shared_from_this()), channel, peer,
                        reason] { self->forget_channel(channel, peer, reason); });
  }
  forget_channel(channel, peer, reason);
}

void RpcAgent::forget_channel(const std::shared_ptr<net::Channel>& channel, std::optional<std::uint32_t> peer,
                              const Error& reason) {
  if (!peer) {
    runtime_.log.info(fmt::format("a connection from {} closed before it said who it was: {}",
                                  channel->peer(), reason.what()));
    return;
  }
  for (const IncomingPtr& call : serving_.of_channel(channel.get())) call->request_stop();
  const bool present = !stopping_.load() && links_->is_present(*peer);
  if (present) references_->on_broken(*peer);
  const Error error(reason.kind(),
                    fmt::format("the connection to worker '{}' (rank {}) ended: {}; it died, or it left",
                                roster_.name(*peer), *peer, reason.message()));
  if (!present) return fail_calls(calls_.take_channel(channel.get()), error);
  const Deadline when = runtime_.executor.deadline_in(kDeathNews);
  const auto give_up = [this, channel, error] { fail_calls(calls_.take_channel(channel.get()), error); };
  if (timers_.at(when, give_up).earliest) wake_leader_by(when);
}

void RpcAgent::on_refused(const std::string& peer, const Error& reason) {
  refusals_.write(fmt::format("rejected a connection from '{}': {}", peer, reason.message()));
}

void RpcAgent::protocol_error(const std::shared_ptr<net::Channel>& channel, const Error& error) {
  runtime_.log.warning(fmt::format("closing the connection to {}: {}", channel->peer(), error.what()));
  channel->close();
}

}  // namespace torchspan::rpc
