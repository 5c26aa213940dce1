#include <fmt/format.h>

#include "rpc/agent.h"
#include "wire/api/tensors.h"

namespace torchspan::rpc {

namespace {
/// What a waiting request costs beside its bytes.
constexpr std::uint64_t kRequestOverhead = 1024;
}  // namespace

void RpcAgent::on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  try {
    const auto peer = links_->peer_of(channel.get());
    if (peer) return dispatch(*peer, channel, std::move(message));
    if (links_->is_shut(channel.get())) return;  // what the dead had sent before
    if (stopping_.load()) return;                // what known peers sent before they heard
    receive_hello(channel, std::move(message));
  } catch (...) {
    protocol_error(channel, to_error(std::current_exception()));
  }
}

/// On whichever thread drives the transport, a user's that waits among them: nothing of what surrounds its
/// own work (inference mode, an autograd context) may reach what others are sent.
void RpcAgent::dispatch(PeerId peer, const std::shared_ptr<net::Channel>& channel, net::Message message) {
  const EnvironmentScope empty{Environment()};
  auto call = std::make_shared<IncomingCall>();
  call->peer = peer.rank;
  call->incarnation = peer.incarnation;
  call->channel = channel;
  call->message = std::move(message);
  call->frame = wire::decode_frame(call->message.header);
  const wire::FrameHeader& header = call->frame.header;
  if ((header.flags & wire::kFlagReply) != 0) return receive_reply(peer, call->message, call->frame);
  if (header.type == Hello::kType) return;
  call->arrived = runtime_.executor.now();
  if (header.type == kCancelCall) {
    auto served = serving_.find(channel.get(), header.call);
    if (served && driven_by_caller_) return host_->post([served] { served->request_stop(); });
    if (served) served->request_stop();
    return;
  }
  if ((header.flags & wire::kFlagHasDeadline) != 0) {
    call->deadline = runtime_.executor.deadline_in(Duration(std::max<std::int64_t>(header.remaining, 0)));
  }
  receive_request(std::move(call));
}

void RpcAgent::receive_reply(PeerId peer, net::Message& message, const wire::FrameView& frame) {
  auto call = calls_.take(frame.header.call, peer.rank);
  if (!call) {
    late_replies_.fetch_add(1);
    try {
      references_->let_go(references_->from_handles(frame.handles, peer));
    } catch (const Error& error) {  // of a reference that was said to be lost; nobody waits for it
      runtime_.log.info(fmt::format("of a reply that came too late: {}", error.what()));
    }
    return;
  }
  wire::Payload payload;
  try {
    payload.value.assign(frame.value.begin(), frame.value.end());
    if ((frame.header.flags & wire::kFlagError) != 0) {
      auto story = annotate(*call, std::make_exception_ptr(wire::from_payload<Error>(payload)));
      if (const auto* typed = frame.blob(kErrorBlob))
        story = functions_.errors().rebuild(typed->bytes, story);
      return call->completion->fail(story);
    }
    payload.references = references_->from_handles(frame.handles, peer);
    payload.tensors =
        wire::unpack(frame.tensor_metadata, message.segments,
                     {.place = call->user_values ? devices_.results(peer.rank, roster_) : nullptr});
    CallInfo info{call->info.type, call->name, peer.rank, frame.header.call, true, call->site};
    for (Interceptor* interceptor : interceptors_) {
      if (const auto* blob = frame.blob(interceptor->name()))
        interceptor->incoming(info, payload.tensors, blob->bytes);
    }
    if (call->user_values) {
      runtime_.spans.record(SpanKind::kCall, call->name, call->started, frame.header.call);
    }
    call->completion->succeed(payload);
  } catch (...) {
    call->completion->fail(annotate(*call, std::current_exception()));
  }
  call.reset();  // its result too, when nobody waits for it
  references_->let_go(std::move(payload.references));
}

void RpcAgent::refuse(const IncomingPtr& call, std::exception_ptr error) {
  ReplyCompletion(std::static_pointer_cast<RpcAgent>(shared_from_this()), call).fail(std::move(error));
  references_->let_go(std::move(call->payload.references));
}

void RpcAgent::receive_request(IncomingPtr call) {
  running_.fetch_add(1);
  const wire::MessageType type = call->frame.header.type;
  call->info = {type, {}, call->peer, call->frame.header.call, false};
  try {
    take_handles(*call);
    auto it = handlers_.find(static_cast<std::uint16_t>(type));
    if (it == handlers_.end()) {
      throw Error(
          ErrorKind::kUnsupported,
          fmt::format("worker '{}' does not serve messages of type {:#06x}: its session lacks the extension "
                      "that does",
                      self_.name, static_cast<int>(type)));
    }
    const Entry& entry = it->second;
    call->name = entry.name;
    call->info.name = call->name;
    call->user_values = entry.user_values;
    const bool here =
        entry.where == RunOn::kReceiver || (entry.where == RunOn::kDispatcher && !driven_by_caller_);
    if (here && call->channel) return run(call, entry);
    call->bytes = kRequestOverhead + call->message.header.size();
    for (const Buffer& segment : call->message.segments) call->bytes += segment.size;
    if (entry.where == RunOn::kPool) serving_.add(call);
    if (is_inline(*call)) return inline_calls_.emplace_back(call, &entry), void();
    host_->post([self = std::static_pointer_cast<RpcAgent>(shared_from_this()), call, &entry] {
      self->run(call, entry);
    });
  } catch (...) {
    refuse(call, std::current_exception());
  }
}

std::exception_ptr RpcAgent::count_failed_creation(const IncomingCall& call,
                                                   const std::exception_ptr& cause) {
  if (call.creation == wire::Handle{} || call.peer == self_.rank) return cause;
  try {
    const auto* site = call.frame.blob(kSiteBlob);
    references_->arriving_creation(call.creation, call.from(), site ? site->bytes : BytesView())
        ->set_error(cause);
    return cause;
  } catch (...) {  // it was not for this worker
    return std::current_exception();
  }
}

/// At once, in the order of arrival: what comes later on this channel may ask what became of them.
void RpcAgent::take_handles(IncomingCall& call) {
  std::vector<wire::Handle> handles = call.frame.handles;
  const wire::MessageType type = call.frame.header.type;
  if (type == kCreateRemote || type == kCreateByOperator || type == kCreateByMethod) {
    if (handles.empty()) throw Error(ErrorKind::kInvalid, "a creation came without its reference");
    call.creation = handles.front();
    handles.erase(handles.begin());
  }
  call.payload.references = references_->from_handles(handles, call.from());
}

void RpcAgent::unpack(IncomingCall& call) {
  const wire::FrameView& frame = call.frame;
  call.payload.value.assign(frame.value.begin(), frame.value.end());
  call.payload.tensors = wire::unpack(frame.tensor_metadata, call.message.segments);
  if (!call.user_values) return;
  call.info.no_grad = frame.blob(kNoGradBlob) != nullptr;
  for (Interceptor* interceptor : interceptors_) {
    const auto* blob = frame.blob(interceptor->name());
    auto value =
        interceptor->incoming(call.info, call.payload.tensors, blob == nullptr ? BytesView() : blob->bytes);
    if (value) call.values.push_back(std::move(value));
  }
}

namespace {

/// Runs `next` when every future is done, whatever their outcomes.
void when_done(const std::vector<Future<void>>& futures, std::function<void()> next) {
  auto left = std::make_shared<std::atomic<std::size_t>>(futures.size());
  for (const Future<void>& future : futures) {
    future.add_done_callback([left, next](Future<void>) {
      if (left->fetch_sub(1) == 1) next();
    });
  }
}

void throw_first_failure(const std::vector<Future<void>>& futures) {
  for (const Future<void>& future : futures) {
    if (future.error()) std::rethrow_exception(future.error());
  }
}

}  // namespace

void RpcAgent::serve(const IncomingPtr& call, const Entry& entry,
                     const std::shared_ptr<ReplyCompletion>& reply,
                     const std::vector<Future<void>>& references) {
  try {
    if (call->deadline.passed(runtime_.executor.now()))
      throw Error(ErrorKind::kTimedOut, "the caller's deadline passed before the work could begin");
    if (call->stop_requested())
      throw Error(ErrorKind::kCancelled, "the caller gave the call up before the work could begin");
    throw_first_failure(references);
    serving_.begin(*call);
    entry.serve(call, reply);
  } catch (...) {
    reply->fail(std::current_exception());
  }
  leave_call(*call, entry);
}

void RpcAgent::leave_call(IncomingCall& call, const Entry& entry) {
  if (!call.end_one_of_both()) return;
  auto references = std::move(call.payload.references);
  if (entry.where != RunOn::kPool) references_->let_go(std::move(references));  // else here and now
}

/// Where the pool has no thread, this is that of whoever posted the call.
void RpcAgent::run(const IncomingPtr& call, const Entry& entry) {
  const EnvironmentScope empty{Environment()};
  auto reply =
      std::make_shared<ReplyCompletion>(std::static_pointer_cast<RpcAgent>(shared_from_this()), call);
  std::vector<Future<void>> references, waits;
  try {
    unpack(*call);
    for (const auto& reference : call->payload.references) {
      if (!reference) continue;
      references.push_back(std::static_pointer_cast<Reference>(reference)->ready());
      if (!references.back().done()) waits.push_back(references.back());
    }
  } catch (...) {
    reply->fail(std::current_exception());
    return leave_call(*call, entry);
  }
  if (waits.empty()) return serve(call, entry, reply, references);
  // What it waits for may never come: the end of the call ends the wait.
  auto hook = std::make_shared<std::unique_ptr<StopHook>>();
  *hook = std::make_unique<StopHook>(stop_token_of(call), [reply] {
    reply->fail(std::make_exception_ptr(
        Error(ErrorKind::kTimedOut,
              "a reference among the arguments was not confirmed before the call ended; the "
              "creation of its value may have been lost")));
  });
  when_done(waits, [this, call, &entry, reply, references, hook] {
    hook->reset();
    serve(call, entry, reply, references);
  });
}

}  // namespace torchspan::rpc
