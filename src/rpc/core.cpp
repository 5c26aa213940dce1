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
      workers_{self_},
      host_(std::make_shared<Host>(runtime.executor, pool_options(options_))),
      default_timeout_(options_.default_timeout) {}

void Core::open(const WorkerService::MakeTransport& make_transport) {
  references_ = std::make_shared<References>(weak_from_this(), self_.rank);
  worker_ = std::make_unique<Worker>(shared_from_this());
  install_handlers(*this);
  if (!make_transport) return;
  transport_ = make_transport(*this);
  if (!options_.listen.empty()) address_ = transport_->listen(options_.listen);
}

void Core::start(std::unique_ptr<rendezvous::Membership> membership) {
  membership_ = std::move(membership);
  std::vector<LinkMember> link_members;
  workers_.clear();
  for (const auto& member : membership_->members()) {
    WorkerInfo info{member.name, static_cast<std::uint32_t>(member.rank)};
    workers_.push_back(info);
    link_members.push_back({info, member.address, member.epoch});
    if (info.rank == self_.rank) epoch_ = member.epoch;
  }
  if (!transport_) {
    timer_ = runtime_.executor.make_parker();
    leader_ = runtime_.executor.spawn(self_.name + "/timer", [this] { watch_deadlines(); });
    return;
  }
  links_ = std::make_unique<Links>(*transport_, runtime_.executor, self_.rank, std::move(link_members));
  leader_ = runtime_.executor.spawn(self_.name + "/net", [this] { lead(); });
  membership_->on_death([this](const rendezvous::Member& member, const Error& reason) {
    member_departed(static_cast<std::uint32_t>(member.rank), reason);
  });
  membership_->on_departure([this](const rendezvous::Member& member) {
    member_departed(
        static_cast<std::uint32_t>(member.rank),
        Error(ErrorKind::kDisconnected, fmt::format("worker '{}' has left the world", member.name)));
  });
}

void Core::lead() {
  Executor& executor = runtime_.executor;
  const Duration spin = executor.spin_limit();
  TimePoint last = executor.now();
  while (!stopping_.load(std::memory_order_acquire)) {
    const bool busy = transport_->poll();
    fail_expired();
    if (busy) {
      last = executor.now();
    } else if (spin > Duration::zero() && executor.now() - last < spin) {
      executor.yield();
    } else {
      transport_->wait(calls_.next_deadline());
    }
  }
}

void Core::watch_deadlines() {
  while (!stopping_.load(std::memory_order_acquire)) {
    fail_expired();
    timer_->park(calls_.next_deadline());
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
  for (const auto& callback : departure_callbacks_) {
    for (const WorkerInfo& worker : workers_) {
      if (worker.rank != self_.rank) callback(worker.rank, reason);
    }
  }
  fail_calls(calls_.take_all(), reason);
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
  if (call.user_values && call.site.line() != 0) {
    std::string_view file = call.site.file_name();
    file.remove_prefix(std::min(file.size(), file.rfind('/') + 1));
    text += fmt::format(" [called at {}:{}]", file, call.site.line());
  }
  Error error(plain.kind(), std::move(text));
  error.with_worker(workers_[call.peer].name).with_call(call.name);
  error.with_elapsed(runtime_.executor.now() - call.started);
  for (const RemoteFrame& frame : plain.frames()) error.with_frame(frame);
  return std::make_exception_ptr(error);
}

std::uint32_t Core::resolve(const Destination& to) const {
  std::string wanted;
  if (to.rank()) {
    if (*to.rank() >= 0 && static_cast<std::size_t>(*to.rank()) < workers_.size()) {
      return static_cast<std::uint32_t>(*to.rank());
    }
    wanted = fmt::format("rank {}", *to.rank());
  } else {
    for (const WorkerInfo& worker : workers_) {
      if (worker.name == to.name()) return worker.rank;
    }
    wanted = fmt::format("worker '{}'", to.name());
  }
  std::string known;
  for (const WorkerInfo& worker : workers_) known += fmt::format(" '{}' ({})", worker.name, worker.rank);
  throw Error(ErrorKind::kInvalid, fmt::format("there is no {} in this world; there are{}", wanted, known));
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

Deadline Core::deadline_for(const CallOptions& options) const {
  const Duration timeout = options.timeout.value_or(default_timeout_.load());
  return timeout == Duration::zero() ? Deadline::never() : runtime_.executor.deadline_in(timeout);
}

std::map<std::string, Bytes> Core::all_gather(const std::string& tag, const Bytes& mine,
                                              const std::vector<std::string>& participants,
                                              Deadline deadline) {
  std::vector<int> ranks;
  for (const std::string& name : participants) ranks.push_back(static_cast<int>(resolve(name)));
  if (ranks.empty()) {
    for (const WorkerInfo& worker : workers_) ranks.push_back(static_cast<int>(worker.rank));
  }
  std::sort(ranks.begin(), ranks.end());
  if (!membership_)
    throw Error(ErrorKind::kCancelled, "this worker does not serve: start it, or it was shut down");
  // Only members wait for each other; the tag tells groups apart, so that their rounds are counted one by
  // one.
  std::string group = tag;
  for (int rank : ranks) group += fmt::format(".{}", rank);
  const std::vector<Bytes> gathered = membership_->all_gather(group, mine, ranks, deadline);
  std::map<std::string, Bytes> result;
  for (std::size_t i = 0; i < ranks.size(); ++i) result[workers_[ranks[i]].name] = gathered[i];
  return result;
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
          calls_.size() != 0 || running_.load() != 0 || !references_->settled()};
}

void Core::member_departed(std::uint32_t rank, const Error& reason) {
  if (rank == self_.rank || !links_ || !links_->departed(rank, reason)) return;
  fail_calls(calls_.take_peer(rank), reason);
  references_->on_departure(rank);
  for (const auto& callback : departure_callbacks_) callback(rank, reason);
}

void Core::on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  const auto peer = links_->closed(channel.get());
  auto calls = calls_.take_channel(channel.get());
  if (!peer) {
    runtime_.log.info(fmt::format("a connection from {} closed before it said who it was: {}",
                                  channel->peer(), reason.what()));
    return;
  }
  if (calls.empty()) return;
  Error error(reason.kind(),
              fmt::format("the connection to worker '{}' (rank {}) ended: {}; it died, or it left",
                          workers_[*peer].name, *peer, reason.message()));
  fail_calls(std::move(calls), error);
}

void Core::protocol_error(const std::shared_ptr<net::Channel>& channel, const Error& error) {
  runtime_.log.warning(fmt::format("closing the connection to {}: {}", channel->peer(), error.what()));
  channel->close();
}

}  // namespace torchspan::rpc
