#include <fmt/format.h>

#include "rpc/agent.h"
#include "wire/api/tensors.h"

namespace torchspan::rpc {
namespace {

/// How long a failure waits whose caller's connection takes nothing more, and how many wait at most before
/// such connections are closed.
constexpr Duration kFullPause = std::chrono::milliseconds(50);
constexpr std::size_t kMostUnsentFailures = 1u << 16;

/// Everything that a call without gradients carries.
void detach_all(std::span<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) tensor = tensor.detach();
  }
}

/// Tensors inside a graph that no interceptor took over travel as plain values: the graph cannot follow them.
bool detach_graph_tensors(std::span<at::Tensor> tensors) {
  bool any = false;
  for (at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.requires_grad() || tensor.is_leaf()) continue;
    tensor = tensor.detach();
    any = true;
  }
  return any;
}

}  // namespace

RpcAgent::Outgoing RpcAgent::prepare(const CallInfo& info, PeerId to, wire::Payload& payload,
                                     bool user_values) {
  Outgoing out;
  try {
    if (user_values && info.no_grad) {
      detach_all(payload.tensors);
      if (!info.reply) out.frame.blobs.push_back({kNoGradBlob, Bytes(1)});
    } else if (user_values) {
      for (Interceptor* interceptor : interceptors_) {
        Bytes header = interceptor->outgoing(info, payload.tensors);
        if (!header.empty()) out.frame.blobs.push_back({std::string(interceptor->name()), std::move(header)});
      }
      if (detach_graph_tensors(payload.tensors)) warn_of_detached(info);
    }
    const bool arguments = user_values && !info.reply;
    out.tensors =
        wire::pack(payload.tensors, {.place = arguments ? devices_.arguments(info.peer, roster_) : nullptr});
    out.frame.handles = references_->to_handles(payload.references, to);
  } catch (...) {
    undo(info, out.frame);
    throw;
  }
  out.frame.value = std::move(payload.value);
  out.frame.tensor_metadata = std::move(out.tensors.metadata);
  out.frame.header.instance = instance_;
  out.frame.header.sequence = ++sequence_;
  out.frame.header.call = info.call;
  return out;
}

void RpcAgent::undo(const CallInfo& info, const wire::Frame& frame) {
  references_->undo(frame.handles);
  for (const wire::NamedBlob& blob : frame.blobs) {
    for (Interceptor* interceptor : interceptors_) {
      if (interceptor->name() == blob.name) interceptor->undo(info, blob.bytes);
    }
  }
}

void RpcAgent::warn_of_detached(const CallInfo& info) {
  runtime_.metrics.counter("rpc.detached_tensors").add();
  if (warned_of_detached_.exchange(true)) return;
  const std::string site = info.reply ? "" : site_text(info.site);
  runtime_.log.warning(fmt::format(
      "tensors of '{}' {} worker '{}'{} are part of an autograd graph and travel detached, since the call "
      "was made in no autograd::Context, or in one that had ended: gradients do not cross workers then. "
      "Threads of the program's own need an autograd::ContextScope; calls that evaluate are made "
      "with({{.no_grad = true}}) (said once)",
      info.name, info.reply ? "back to" : "to", roster_.name(info.peer),
      site.empty() ? "" : fmt::format(", called at {},", site)));
}

void RpcAgent::transmit(const std::shared_ptr<net::Channel>& channel, const wire::Frame& frame,
                        const wire::PackedTensors& tensors) {
  Bytes header = wire::encode_frame(frame);
  std::uint64_t bytes = header.size();
  for (const Segment& segment : tensors.segments) bytes += segment.size;
  bytes_sent_.add(bytes);
  if (channel) return channel->send(header, tensors.segments);
  loop_back(header, tensors);
}

/// A message to ourselves takes the whole path: its bytes are copied like those that cross a wire.
void RpcAgent::loop_back(const Bytes& header, const wire::PackedTensors& tensors) {
  net::Message message{header, {}};
  for (const Segment& segment : tensors.segments) {
    Buffer buffer = allocate_buffer(segment.size);
    if (segment.size != 0) std::memcpy(buffer.data, segment.data, segment.size);
    message.segments.push_back(std::move(buffer));
  }
  dispatch({self_.rank, incarnation_}, nullptr, std::move(message));
}

void RpcAgent::send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion) {
  do_send(to, std::move(request), std::move(completion), nullptr);
}

void RpcAgent::do_send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion,
                       const wire::Handle* creation) {
  const TimePoint now = runtime_.executor.now();
  PendingCall call;
  call.completion = std::move(completion);
  call.name = request.name;
  call.peer = to;
  call.deadline = request.deadline;
  call.started = now;
  call.site = request.site;
  call.user_values = request.user_values;
  const std::uint64_t id = calls_.next_id();
  const CallInfo info{request.type, request.name, to, id, false, request.site, request.no_grad};
  call.info = info;
  call.info.name = {};
  try {
    check_may_start(request, now);
    // Fails before anything has to be undone.
    auto link = to == self_.rank ? Links::Link{nullptr, {to, incarnation_}} : links_->to(to);
    if (creation != nullptr && creation->incarnation != link.peer.incarnation)
      throw Error(ErrorKind::kDisconnected, "another process took the worker's place meanwhile; call again");
    Outgoing out = prepare(info, link.peer, request.payload, request.user_values);
    out.frame.header.type = request.type;
    if (!request.deadline.is_never()) {
      out.frame.header.flags |= wire::kFlagHasDeadline;
      out.frame.header.remaining = request.deadline.left(now).count();
    }
    if (creation != nullptr) {
      out.frame.handles.insert(out.frame.handles.begin(), *creation);
      if (Bytes site = encode_site(request.site); !site.empty())
        out.frame.blobs.push_back({kSiteBlob, std::move(site)});
    }
    try {
      if (!start_call(id, call, out, std::move(link))) return;
    } catch (...) {
      if (creation != nullptr) out.frame.handles.erase(out.frame.handles.begin());
      undo(info, out.frame);
      throw;
    }
    watch_stop(id, {request.stop, request.inherited_stop});
  } catch (...) {
    const std::exception_ptr error = annotate(call, std::current_exception());
    if (creation == nullptr && await_news(id, call, error)) return;
    if (creation != nullptr) references_->creation_not_sent(creation->fork, error);
    call.completion->fail(error);
  }
}

/// A call that found no way to a peer which is there, as far as is known, fails by its death if that is told
/// in a moment. False when it is the caller's to fail.
bool RpcAgent::await_news(std::uint64_t id, PendingCall& call, const std::exception_ptr& error) {
  const std::uint32_t to = call.peer;
  if (to_error(error).kind() != ErrorKind::kDisconnected || stopping_.load() || !is_present(to)) return false;
  call.channel = nullptr;
  try {
    calls_.add(id, call);
  } catch (const Error&) {  // too many wait for that peer
    return false;
  }
  const auto give_up = [this, id, error] {
    if (auto left = calls_.take(id)) left->completion->fail(error);
  };
  if (stopping_.load() || !is_present(to)) return give_up(), true;
  const Deadline when = earlier(runtime_.executor.deadline_in(kDeathNews), call.deadline);
  if (timers_.at(when, give_up).earliest) wake_leader_by(when);
  return true;
}

void RpcAgent::check_may_start(const Request& request, TimePoint now) const {
  check_running();
  if (request.stop.stop_requested() || request.inherited_stop.stop_requested())
    throw Error(ErrorKind::kCancelled, "its stop token was stopped before the call was made");
  if (request.deadline.passed(now))
    throw Error(ErrorKind::kTimedOut, "the deadline had passed before the call was made");
}

bool RpcAgent::start_call(std::uint64_t id, PendingCall& call, const Outgoing& out, Links::Link link) {
  const std::uint32_t to = call.peer;
  auto& channel = link.channel;
  for (bool again : {true, false}) {
    call.channel = channel.get();
    const Deadline deadline = call.deadline;
    if (calls_.add(id, call)) wake_leader_by(deadline);
    sent_.fetch_add(1);
    try {
      // Whoever ends all calls, or all of this peer, did so before the call was added: then it sees to
      // itself.
      if (stopping_.load()) throw Error(ErrorKind::kCancelled, "this worker is shutting down");
      if (channel && !links_->is_present(to)) links_->to(to);
      transmit(channel, out.frame, out.tensors);
      if (channel) watch_stopped_peers();
      return true;
    } catch (const Error& error) {
      sent_.fetch_sub(1);
      auto back = calls_.take(id);
      if (!back) return false;  // ended by the closing of its channel
      call = std::move(*back);
      if (!again || !channel || error.kind() != ErrorKind::kDisconnected || !links_->is_present(to)) throw;
      links_->drop(channel.get());  // it broke, and nothing of the call is sent: a fresh connection may do
      Links::Link fresh = links_->to(to);
      if (fresh.peer != link.peer) throw;  // the handles in it are for the process that had the rank before
      link = std::move(fresh);
    }
  }
  return false;
}

void RpcAgent::watch_stop(std::uint64_t id, const std::array<std::stop_token, 2>& tokens) {
  for (const std::stop_token& stop : tokens) {
    if (!stop.stop_possible()) continue;
    auto hook = std::make_unique<StopHook>(stop, [core = std::weak_ptr<Endpoint>(weak_from_this()), id] {
      if (auto alive = core.lock()) static_cast<RpcAgent&>(*alive).cancel(id);
    });
    if (!calls_.attach(id, hook)) return;
  }
}

void RpcAgent::cancel(std::uint64_t id) {
  auto call = calls_.take(id);
  if (!call) return;
  if (call->peer == self_.rank) {
    if (auto served = serving_.find(nullptr, id)) served->request_stop();
  } else {
    try {
      wire::Frame frame;
      frame.header.type = kCancelCall;
      frame.header.flags = wire::kFlagOneWay;
      frame.header.instance = instance_;
      frame.header.call = id;
      transmit(links_->to(call->peer).channel, frame, {});
    } catch (const Error&) {  // then its handler hears of the broken connection
    }
  }
  call->completion->fail(annotate(
      *call,
      std::make_exception_ptr(Error(ErrorKind::kCancelled,
                                    "its stop token was stopped; its handler over there is told to stop"))));
}

ReferencePtr RpcAgent::create(std::uint32_t to, Request request, std::string type_name) {
  const std::uint64_t tag = wire::digest(type_name);
  if (to == self_.rank) {
    class Ignore final : public Completion {
     public:
      Ignore(std::shared_ptr<References> references, std::shared_ptr<OwnerReference> owner)
          : references_(std::move(references)), owner_(std::move(owner)) {}
      void succeed(wire::Payload&) override {}
      void fail(std::exception_ptr error) override {
        references_->own_creation_failed(std::move(owner_), error);
      }

     private:
      std::shared_ptr<References> references_;
      std::shared_ptr<OwnerReference> owner_;
    };
    auto owner = references_->begin_own_creation(type_name, request.site);
    const wire::Handle handle{to, owner->value_id(), {}, tag, incarnation_};
    do_send(to, std::move(request), std::make_shared<Ignore>(references_, owner), &handle);
    return owner;
  }
  class Created final : public Completion {
   public:
    Created(std::shared_ptr<References> references, std::shared_ptr<UserReference> user)
        : references_(std::move(references)), user_(std::move(user)) {}
    void succeed(wire::Payload&) override { references_->created(user_); }
    void fail(std::exception_ptr error) override { references_->creation_failed(user_, error); }

   private:
    std::shared_ptr<References> references_;
    std::shared_ptr<UserReference> user_;
  };
  auto user = references_->begin_creation(to, type_name, request.site);
  const wire::Handle handle{to, user->value_id(), user->fork_id(), tag, user->owner_peer().incarnation};
  do_send(to, std::move(request), std::make_shared<Created>(references_, user), &handle);
  return user;
}

void RpcAgent::answered(IncomingCall& call) {
  if (auto timer = serving_.remove(call)) timers_.cancel(*timer);
  if (call.end_one_of_both()) references_->let_go(std::move(call.payload.references));
  handled_.fetch_add(1);
  running_.fetch_sub(1);
}

ReplyCompletion::~ReplyCompletion() {
  if (!sent_.load()) {
    fail(std::make_exception_ptr(Error(ErrorKind::kCancelled, "the handler was dropped before it replied")));
  }
}

void ReplyCompletion::succeed(wire::Payload& reply) {
  if (sent_.exchange(true)) return;
  CallInfo info = call_->info;
  info.reply = true;
  try {
    RpcAgent::Outgoing out = [&] {
      const EnvironmentScope serving(Environment::of_call(call_));
      return core_->prepare(info, call_->from(), reply, call_->user_values);
    }();
    out.frame.header.type = info.type;
    out.frame.header.flags |= wire::kFlagReply;
    try {
      core_->transmit(call_->channel, out.frame, out.tensors);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kOverloaded && !call_->user_values && out.tensors.segments.empty()) {
        // Whoever asks takes kOverloaded for a request that was not served: such an answer waits for room.
        core_->send_failure({call_->channel, std::move(out.frame), call_->name, call_->deadline});
        return core_->answered(*call_);
      }
      core_->undo(info, out.frame);
      if (error.kind() != ErrorKind::kDisconnected) throw;
      core_->runtime_.log.info(
          fmt::format("the reply of '{}' has no way back: {}", call_->name, error.what()));
    }
  } catch (...) {
    sent_.store(false);
    return fail(std::current_exception());
  }
  core_->answered(*call_);
}

namespace {

std::optional<Bytes> encoded_type(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const UserFailure& failure) {
    return failure.encoded();
  } catch (...) {
    return std::nullopt;
  }
}

}  // namespace

void ReplyCompletion::fail(std::exception_ptr cause) {
  if (sent_.exchange(true)) return;
  cause = core_->count_failed_creation(*call_, cause);
  RpcAgent::Failure failure{call_->channel, {}, call_->name, call_->deadline};
  wire::Frame& frame = failure.frame;
  frame.header.type = call_->info.type;
  frame.header.flags = wire::kFlagReply | wire::kFlagError;
  frame.header.call = call_->info.call;
  frame.header.instance = core_->instance_;
  frame.value = wire::to_payload(to_error(cause)).value;
  if (auto encoded = encoded_type(cause)) frame.blobs.push_back({kErrorBlob, std::move(*encoded)});
  core_->send_failure(std::move(failure));
  core_->answered(*call_);
}

void RpcAgent::send_failure(Failure failure) {
  try {
    return transmit(failure.channel, failure.frame, {});
  } catch (const Error& error) {
    const bool full = error.kind() == ErrorKind::kOverloaded && !stopping_.load();
    if (!full || failure.deadline.passed(runtime_.executor.now())) {
      return runtime_.log.info(
          fmt::format("the answer to '{}' has no way back: {}", failure.call, error.what()));
    }
    if (unsent_failures_.fetch_add(1) >= kMostUnsentFailures) {
      unsent_failures_.fetch_sub(1);
      return protocol_error(failure.channel, error);  // then the caller hears of that
    }
  }
  after(kFullPause,
        [weak = std::weak_ptr<Endpoint>(weak_from_this()), failure = std::move(failure)]() mutable {
          const auto alive = weak.lock();
          if (!alive) return;
          auto& core = static_cast<RpcAgent&>(*alive);
          core.unsent_failures_.fetch_sub(1);
          core.send_failure(std::move(failure));
        });
}

}  // namespace torchspan::rpc
