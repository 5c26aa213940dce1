#include "rpc/agent/request_sender.h"

#include <fmt/format.h>
#include <new>
#include <utility>

#include <torchspan/detail/rpc/environment.h>

#include "core/api/timeout_notice.h"

namespace torchspan::rpc {
namespace {

/// Between attempts to connect to a member that accepts no connection.
constexpr Duration kRedialPause = std::chrono::milliseconds(250);

/// Completes a creation on this worker itself.
class OwnCreation final : public Completion {
 public:
  OwnCreation(std::shared_ptr<References> references, std::shared_ptr<OwnerReference> owner)
      : references_(std::move(references)), owner_(std::move(owner)) {}
  void succeed(wire::Payload&) override {}
  void fail(std::exception_ptr error) override { references_->own_creation_failed(std::move(owner_), error); }

 private:
  std::shared_ptr<References> references_;
  std::shared_ptr<OwnerReference> owner_;
};

/// Completes a creation on another worker.
class RemoteCreation final : public Completion {
 public:
  RemoteCreation(std::shared_ptr<References> references, std::shared_ptr<UserReference> user)
      : references_(std::move(references)), user_(std::move(user)) {}
  void succeed(wire::Payload&) override { references_->created(user_); }
  void fail(std::exception_ptr error) override { references_->creation_failed(user_, error); }

 private:
  std::shared_ptr<References> references_;
  std::shared_ptr<UserReference> user_;
};

/// Whether it is the exception of another worker's function, of a registered type: a creation that this call uses failed.
bool is_rebuilt(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const std::nested_exception&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// The current exception. Lack of memory is kOverloaded: the request was not sent, and may be later.
std::exception_ptr why_unsent() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return std::make_exception_ptr(
        Error(ErrorKind::kOverloaded, "no memory left to send it (std::bad_alloc)"));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

void RequestSender::send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion) {
  do_send(to, std::move(request), std::move(completion), nullptr);
}

ReferencePtr RequestSender::create(std::uint32_t to, Request request, const std::string& type_name) {
  const std::uint64_t tag = wire::digest(type_name);
  const std::shared_ptr<References>& references = state_.references;
  if (to == state_.self.rank) {
    auto owner = references->begin_own_creation(type_name, request.site);
    const wire::Handle handle{to, owner->value_id(), {}, tag, state_.incarnation};
    do_send(to, std::move(request), std::make_shared<OwnCreation>(references, owner), &handle);
    return owner;
  }
  auto user = references->begin_creation(to, type_name, request.site);
  const wire::Handle handle{to, user->value_id(), user->fork_id(), tag, user->owner_peer().incarnation};
  do_send(to, std::move(request), std::make_shared<RemoteCreation>(references, user), &handle);
  return user;
}

OutgoingMessage RequestSender::prepare(const CallInfo& info, const PeerChannels::Link& link, Request& request,
                                       const wire::Handle* creation) {
  OutgoingMessage out = sender_.prepare(info, link.peer, request.payload,
                                        {request.user_values, request.place, link.channel.get()});
  out.frame.header.type = request.type;
  out.frame.header.features |= request.feature;
  if (!request.deadline.is_never() && !request.served_late) {
    out.frame.header.flags |= wire::kFlagHasDeadline;
    out.frame.header.remaining = request.deadline.left(state_.runtime.executor.now()).count();
  }
  if (creation != nullptr) {
    out.frame.handles.insert(out.frame.handles.begin(), *creation);
    if (Bytes site = encode_site(request.site); !site.empty())
      out.frame.blobs.push_back({kSiteBlob, std::move(site)});
  }
  return out;
}

void RequestSender::do_send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion,
                            const wire::Handle* creation) {
  const TimePoint now = state_.runtime.executor.now();
  const std::optional<wire::Handle> created = creation == nullptr ? std::nullopt : std::optional(*creation);
  PendingCall call;
  call.completion = std::move(completion);
  call.name = request.name;
  call.peer = to;
  call.deadline = request.deadline;
  call.started = now;
  call.site = request.site;
  call.user_values = request.user_values;
  call.shown = request.user_values || request.user_call;
  call.handler = Environment::served();
  call.streams = device::Streams::current_side();
  const std::uint64_t id = state_.calls.next_id();
  const CallInfo info{request.type, request.name, to, id, false, request.site, request.no_grad};
  call.info = info;
  call.info.name = {};
  try {
    check_may_start(request, now);
    // Fails here, before anything has to be undone.
    auto link = to == state_.self.rank ? PeerChannels::Link{nullptr, state_.id()} : state_.channels->to(to);
    check_feature(request, to);
    if (creation != nullptr && creation->incarnation != link.peer.incarnation)
      throw Error(ErrorKind::kDisconnected, "another process took the worker's place meanwhile; call again");
    // What this worker itself does for the call comes after the caller's streams, which share its memory.
    if (to == state_.self.rank) state_.copies.order_defaults_after(call.streams);
    OutgoingMessage out = prepare(info, link, request, creation);
    start_or_copy(id, call, std::move(out), std::move(link), created);
    watch_stop(id, {request.stop, request.inherited_stop});
  } catch (...) {
    fail_unsent(id, call, created);
  }
}

void RequestSender::start_or_copy(std::uint64_t id, PendingCall& call, OutgoingMessage out,
                                  PeerChannels::Link link, std::optional<wire::Handle> creation) {
  if (out.ready()) return start_or_undo(id, call, out, std::move(link), creation.has_value());
  const Deadline deadline = call.deadline;
  const std::shared_ptr<net::Channel> channel = link.channel;
  if (!out.split.empty()) call.channel = channel.get();  // with which its parts are lost
  try {
    if (state_.calls.add(id, call)) loop_.wake_by(deadline);
  } catch (...) {
    undo(out, creation.has_value(), {});
    throw;
  }
  auto start_copied = [this, id, link = std::move(link), creation](OutgoingMessage& copied) {
    auto taken = state_.calls.take(id);
    if (!taken) return undo(copied, creation.has_value(), {});  // it has ended meanwhile
    try {
      start_or_undo(id, *taken, copied, link, creation.has_value());
    } catch (...) {
      fail_unsent(id, *taken, creation);
    }
  };
  sender_.copying().add(std::move(out), channel, deadline, std::move(start_copied));
  if (!state_.stopping.load()) return;
  // The worker may have stopped before the call was in the table, and then has dropped the message.
  auto taken = state_.calls.take(id);
  if (!taken) return;
  call = std::move(*taken);
  throw Error(ErrorKind::kCancelled, "the worker stopped while the tensors of the call were copied");
}

void RequestSender::undo(OutgoingMessage& out, bool creates, const CallInfo& info) {
  if (creates) out.frame.handles.erase(out.frame.handles.begin());
  sender_.undo(info, out.frame);
}

void RequestSender::start_or_undo(std::uint64_t id, PendingCall& call, OutgoingMessage& out,
                                  PeerChannels::Link link, bool creates) {
  // Nothing reaches the peer before the channel is open: until then, the message can be sent on another one.
  const bool may_repeat = call.user_values && link.channel && !link.channel->opened() && out.split.empty() &&
                          out.carried.empty() && out.lent.empty();
  std::shared_ptr<UnsentCall> unsent;
  if (may_repeat) {
    unsent = std::make_shared<UnsentCall>(UnsentCall{{}, link.peer, creates, link.channel});
    std::swap(unsent->out, out);
  }
  OutgoingMessage& message = unsent ? unsent->out : out;
  try {
    const bool waits = start(id, call, message, std::move(link));
    if (waits && unsent)
      state_.calls.set_unsent(id, std::move(unsent));  // not earlier: start() itself may send twice
  } catch (...) {
    CallInfo info = call.info;
    info.name = call.name;
    undo(message, creates, info);
    throw;
  }
}

bool RequestSender::redial(const std::shared_ptr<net::Channel>& channel, const Error& reason,
                           std::function<void()> then) {
  const bool may_succeed = reason.kind() == ErrorKind::kTimedOut || reason.kind() == ErrorKind::kDisconnected;
  if (channel->opened() || !may_succeed || state_.calls.unsent_on(channel.get()).empty()) return false;
  const Duration pause = reason.kind() == ErrorKind::kTimedOut ? Duration::zero() : kRedialPause;
  loop_.at(state_.runtime.executor.deadline_in(pause), [this, channel, reason, then = std::move(then)] {
    for (const CallTable::Unsent& unsent : state_.calls.unsent_on(channel.get())) resend(unsent, reason);
    fail(state_.calls.take_channel(channel.get()),
         Error(reason.kind(), fmt::format("the connection ended before it was made: {}", reason.message())));
    then();
  });
  return true;
}

/// Sends the message of a call once more. The call stays in the table, where its deadline or its peer's death ends it.
void RequestSender::resend(const CallTable::Unsent& unsent, const Error& reason) {
  UnsentCall& message = *unsent.message;
  // The first reason often says more: after a network lost packets, the peer may have ended.
  if (message.first_failure.empty()) message.first_failure = reason.message();
  message.failure = message.first_failure;
  if (message.first_failure != reason.message()) message.failure += "; then: " + reason.message();
  try {
    const Duration limit = state_.options.connect_timeout;
    const PeerChannels::Link link = state_.channels->to(unsent.peer);
    if (link.peer != message.peer)
      throw Error(ErrorKind::kDisconnected, "another process took the worker's place meanwhile; call again");
    if (limit != Duration::zero() && state_.runtime.executor.now() - unsent.started >= limit) {
      throw Error(
          ErrorKind::kTimedOut,
          fmt::format("no connection to worker '{}' within WorkerOptions::connect_timeout ({:.1f} s), "
                      "although it is a member: {}",
                      state_.peers.name(unsent.peer), to_seconds(limit), message.failure));
    }
    if (!state_.calls.move_to(unsent.id, link.channel.get())) return;
    message.channel = link.channel;
    sender_.send(link.channel, message.out);
  } catch (...) {
    auto call = state_.calls.take(unsent.id);
    if (!call) return;
    std::optional<wire::Handle> creation;
    if (message.creates) creation = message.out.frame.handles.front();
    CallInfo info = call->info;
    info.name = call->name;
    undo(message.out, message.creates, info);
    fail_unsent(unsent.id, *call, creation);
  }
}

void RequestSender::fail_unsent(std::uint64_t id, PendingCall& call,
                                const std::optional<wire::Handle>& creation) {
  const std::exception_ptr error = annotate(call, why_unsent());
  if (!creation && await_death_report(id, call, error)) return;
  if (creation) state_.references->creation_not_sent(creation->fork, error);
  call.completion->fail(error);
}

void RequestSender::check_may_start(const Request& request, TimePoint now) const {
  if (const auto agent = state_.backend.lock()) agent->check_running();
  if (request.stop.stop_requested() || request.inherited_stop.stop_requested())
    throw Error(ErrorKind::kCancelled, "cancelled by its stop token before the call was made");
  if (request.deadline.passed(now))
    throw Error(ErrorKind::kTimedOut, "the deadline had passed before the call was made");
}

void RequestSender::check_feature(const Request& request, std::uint32_t to) const {
  const Protocol protocol = request.feature == 0 ? Protocol() : state_.peers.protocol(to);
  if (protocol.has(request.feature)) return;
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format(
          "worker '{}' (rank {}) runs a release of TorchSpan, or with options, without the feature {:#x} "
          "of the wire format that '{}' needs: update that worker",
          state_.peers.name(to), to, request.feature, request.name));
}

bool RequestSender::start(std::uint64_t id, PendingCall& call, const OutgoingMessage& out,
                          PeerChannels::Link link) {
  const std::uint32_t to = call.peer;
  auto& channel = link.channel;
  for (bool again : {true, false}) {
    call.channel = channel.get();
    const Deadline deadline = call.deadline;
    if (state_.calls.add(id, call)) loop_.wake_by(deadline);
    state_.sent.fetch_add(1);
    try {
      // A shutdown or the peer's departure may have ended all calls before this one was added. Then this code
      // ends it.
      if (state_.stopping.load()) throw Error(ErrorKind::kCancelled, "this worker is shutting down");
      if (channel && !state_.peers.is_present(to)) state_.channels->to(to);
      sender_.send(channel, out);
      if (channel) stopped_peers_.watch();
      return true;
    } catch (const std::exception&) {
      const ErrorKind kind = to_error(std::current_exception()).kind();
      state_.sent.fetch_sub(1);
      auto back = state_.calls.take(id);
      if (!back) return false;  // ended by the closing of its channel
      call = std::move(*back);
      if (!again || !channel || kind != ErrorKind::kDisconnected || !state_.peers.is_present(to)) throw;
      state_.channels->drop(channel.get());  // it broke before the call was sent: try a new connection
      PeerChannels::Link fresh = state_.channels->to(to);
      if (fresh.peer != link.peer) throw;  // the handles in it are for the process that had the rank before
      if (!out.carried.empty() && !fresh.channel->carries_device_memory()) throw;
      link = std::move(fresh);
    }
  }
  return false;
}

/// Keeps a call that found no connection to a peer which is present, as far as this worker knows. If the
/// peer's death is reported within kDeathReportTime, the call fails by it. Returns false if the caller must fail
/// the call.
bool RequestSender::await_death_report(std::uint64_t id, PendingCall& call, const std::exception_ptr& error) {
  const std::uint32_t to = call.peer;
  if (to_error(error).kind() != ErrorKind::kDisconnected || state_.stopping.load() ||
      !state_.peers.is_present(to))
    return false;
  call.channel = nullptr;
  const Deadline when = earlier(state_.runtime.executor.deadline_in(kDeathReportTime), call.deadline);
  try {
    state_.calls.add(id, call);
  } catch (const Error&) {  // too many calls wait for that peer
    return false;
  }
  const auto give_up = [this, id, error] {
    if (auto left = state_.calls.take(id)) left->completion->fail(error);
  };
  if (state_.stopping.load() || !state_.peers.is_present(to)) return give_up(), true;
  loop_.at(when, give_up);
  return true;
}

void RequestSender::watch_stop(std::uint64_t id, const std::array<std::stop_token, 2>& tokens) {
  for (const std::stop_token& stop : tokens) {
    if (!stop.stop_possible()) continue;
    auto hook = std::make_unique<StopHook>(stop, [this, agent = state_.backend, id] {
      if (const auto alive = agent.lock()) cancel(id);
    });
    if (!state_.calls.attach(id, hook)) return;
  }
}

void RequestSender::cancel(std::uint64_t id) {
  auto call = state_.calls.take(id);
  if (!call) return;
  // A handler's deadline stops the handler's calls, which may have the same deadline.
  if (call->deadline.passed(state_.runtime.executor.now())) {
    report_expired(*call);
    return fail_expired(*call);
  }
  if (call->peer == state_.self.rank) {
    if (auto served = state_.serving.find(nullptr, id)) served->request_stop();
  } else {
    try {
      wire::Frame frame;
      frame.header.type = kCancelCall;
      frame.header.flags = wire::kFlagOneWay;
      frame.header.instance = state_.instance;
      frame.header.call = id;
      frame.header.version = state_.peers.protocol(call->peer).version;
      sender_.send(state_.channels->to(call->peer).channel, frame);
    } catch (const std::exception&) {  // the broken connection then stops the handler
    }
  }
  call->completion->fail(annotate(
      *call, std::make_exception_ptr(
                 Error(ErrorKind::kCancelled,
                       "cancelled by its stop token; the handler on the other worker was asked to stop"))));
}

void RequestSender::fail_expired() {
  const CallTable::Calls expired = state_.calls.take_expired(state_.runtime.executor.now());
  for (const PendingCall& call : expired) report_expired(call);
  for (const PendingCall& call : expired) fail_expired(call);
}

void RequestSender::report_expired(const PendingCall& call) const {
  if (!call.shown) return;
  const TimePoint now = state_.runtime.executor.now();
  report_timeout({.kind = "call",
                  .name = call.name,
                  .peer = state_.peers.name(call.peer),
                  .site = site_text(call.site),
                  .seconds = to_seconds(now - call.started)});
  const IncomingPtr handler = call.handler.lock();
  if (!handler || state_.serving.find(handler->channel.get(), handler->info.call) != handler) return;
  report_timeout({.kind = "handler",
                  .name = handler->name,
                  .peer = state_.peers.name(handler->peer),
                  .seconds = to_seconds(now - handler->arrived)});
}

void RequestSender::fail_expired(const PendingCall& call) const {
  std::string text = "no reply came before the deadline; the remote work may still happen";
  if (call.unsent && !call.unsent->failure.empty() && !call.unsent->channel->opened()) {
    text = fmt::format("no connection to the worker, which is a member, was made before the deadline: {}",
                       call.unsent->failure);
  }
  const Error error(ErrorKind::kTimedOut, std::move(text));
  call.completion->fail(annotate(call, std::make_exception_ptr(error)));
}

void RequestSender::fail(CallTable::Calls calls, const Error& reason) {
  for (PendingCall& call : calls) call.completion->fail(annotate(call, std::make_exception_ptr(reason)));
}

void RequestSender::fail_channel_later(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  loop_.at(state_.runtime.executor.deadline_in(kDeathReportTime),
           [this, channel, reason] { fail(state_.calls.take_channel(channel.get()), reason); });
}

std::exception_ptr RequestSender::annotate(const PendingCall& call, const std::exception_ptr& cause) const {
  if (is_rebuilt(cause)) return cause;
  const Error plain = to_error(cause);
  std::string text = plain.message();
  // A failure of the creation that this call uses already names its own worker and call, and keeps them.
  const bool has_call = !plain.call().empty();
  const std::string site = call.user_values ? site_text(call.site) : "";
  if (!site.empty()) text += fmt::format(" [{} at {}]", has_call ? "used" : "called", site);
  Error error(plain.kind(), std::move(text));
  error.with_worker(has_call ? plain.worker() : state_.peers.name(call.peer))
      .with_call(has_call ? plain.call() : call.name);
  error.with_elapsed(state_.runtime.executor.now() - call.started);
  for (const RemoteFrame& frame : plain.frames()) error.with_frame(frame);
  return std::make_exception_ptr(error);
}

namespace {

constexpr Duration kCheckEvery = std::chrono::seconds(1);

}  // namespace

void StoppedPeers::watch() {
  if (state_.options.stopped_limit == Duration::zero() || !state_.channels || watching_.exchange(true))
    return;
  loop_.at(state_.runtime.executor.deadline_in(kCheckEvery), [this] { check(); });
}

void StoppedPeers::check() {
  const TimePoint now = state_.runtime.executor.now();
  const Duration limit = state_.options.stopped_limit;
  std::map<std::uint32_t, TimePoint> stopped;
  for (const std::uint32_t peer : state_.calls.peers()) {
    if (peer == state_.self.rank ||
        membership_->condition(static_cast<int>(peer)) != rendezvous::Condition::kStopped)
      continue;
    const auto before = since_.find(peer);
    stopped[peer] = before == since_.end() ? now : before->second;
    if (now - stopped[peer] < limit) continue;
    calls_.fail(
        state_.calls.take_peer_older(peer, now - limit),
        Error(
            ErrorKind::kDisconnected,
            fmt::format(
                "worker '{}' (rank {}) has been stopped, by a signal or a debugger, for {:.0f} s; continue "
                "it (kill -CONT) and call again, or allow more than {:g} s with TORCHSPAN_STOPPED_LIMIT (0: "
                "no limit)",
                state_.peers.name(peer), peer, to_seconds(now - stopped[peer]), to_seconds(limit))));
  }
  since_ = std::move(stopped);
  watching_.store(false);
  if (state_.calls.size() != 0) watch();
}

}  // namespace torchspan::rpc
