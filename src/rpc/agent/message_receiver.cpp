#include "rpc/agent/message_receiver.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

namespace torchspan::rpc {
namespace {

/// How long a peer may send before this worker learns that it joined, and how much.
constexpr Duration kTimeLimit = std::chrono::seconds(5);
constexpr std::uint64_t kByteLimit = std::uint64_t{64} << 20;

}  // namespace

UnknownPeers::UnknownPeers(AgentState& state, TransportLoop& loop, Deliver deliver, Reject reject)
    : state_(state), loop_(loop), deliver_(std::move(deliver)), reject_(std::move(reject)) {}

void UnknownPeers::receive(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  for (Waiting& waiting : waiting_) {
    if (waiting.channel != channel) continue;
    waiting.bytes += message.header.size();
    for (const Buffer& segment : message.segments) waiting.bytes += segment.size;
    if (waiting.bytes > kByteLimit)
      throw Error(ErrorKind::kOverloaded, "the peer sent too much before this worker learned that it joined");
    return waiting.messages.push_back(std::move(message));
  }
  const wire::FrameView frame = wire::decode_frame(message.header, state_.wire);
  if (frame.header.type != Hello::kType) {
    throw_invalid("the peer's first message is not a hello");
  }
  wire::Payload payload;
  payload.value.assign(frame.value.begin(), frame.value.end());
  const auto hello = wire::from_payload<Hello>(payload);
  if (state_.channels->greet(channel, hello)) {
    if (state_.runtime.log.enabled(LogLevel::kDebug))
      state_.runtime.log.debug(fmt::format("worker '{}' (rank {}) connected", hello.name, hello.rank));
    return;
  }
  const Deadline until = state_.runtime.executor.deadline_in(kTimeLimit);
  waiting_.push_back({channel, hello, until, {}, 0});
  loop_.at(until, [this] { admit(); });
}

void UnknownPeers::admit() {
  DriverLockGuard hold(loop_.driver_lock(), state_.runtime.executor);
  const TimePoint now = state_.runtime.executor.now();
  std::vector<Waiting> still, admitted;
  for (Waiting& waiting : std::exchange(waiting_, {})) {
    if (state_.channels->greet(waiting.channel, waiting.hello)) {
      admitted.push_back(std::move(waiting));
    } else if (!waiting.until.passed(now)) {
      still.push_back(std::move(waiting));
    } else {
      reject_(waiting.channel,
              Error(ErrorKind::kDenied,
                    fmt::format(
                        "a peer calls itself '{}' (rank {}, instance {:x}), which is not a member of this "
                        "world; a worker of an earlier run may still be alive",
                        waiting.hello.name, waiting.hello.rank, waiting.hello.instance)));
    }
  }
  waiting_ = std::move(still);
  for (Waiting& waiting : admitted) {
    for (net::Message& message : waiting.messages) deliver_(waiting.channel, std::move(message));
  }
  // Inline calls among the messages wait for the loop, which runs them after a poll.
  if (!admitted.empty()) loop_.wake();
}

void UnknownPeers::closed(const std::shared_ptr<net::Channel>& channel) {
  std::erase_if(waiting_, [&](const Waiting& waiting) { return waiting.channel == channel; });
}

void UnknownPeers::clear() {
  std::vector<Waiting> waiting;  // its channels are destroyed without the lock
  DriverLockGuard hold(loop_.driver_lock(), state_.runtime.executor);
  waiting.swap(waiting_);
}

namespace {

/// The error of a reply, with the kind with which the function refused the call.
Error received_error(const wire::FrameView& frame, wire::Payload& payload) {
  const Error sent = wire::from_payload<Error>(payload);
  const auto* refusal = frame.blob(kRefusalBlob);
  if (refusal == nullptr || refusal->bytes.size() != 1) return sent;
  Error error(static_cast<ErrorKind>(refusal->bytes[0]), sent.message());
  error.with_worker(sent.worker()).with_call(sent.call()).with_elapsed(sent.elapsed());
  for (const RemoteFrame& frame_of_chain : sent.frames()) error.with_frame(frame_of_chain);
  return error;
}

/// Lists the segments that the connection wrote to memory of device_memory().
void find_on_device(ReceivedMessage& message) {
  for (std::size_t i = 0; i < message.segments.size(); ++i) {
    const Buffer& segment = message.segments[i];
    if (segment.device_target == 0) continue;
    const auto* memory = static_cast<const at::Tensor*>(segment.owner.get());
    message.on_device.push_back({i, memory->device(), wire::DeviceSegment::Memory::kReceived});
  }
}

}  // namespace

MessageReceiver::MessageReceiver(AgentState& state, TransportLoop& loop, RequestSender& calls,
                                 RequestServer& server)
    : state_(state),
      loop_(loop),
      calls_(calls),
      server_(server),
      unknown_peers_(
          state, loop,
          [this](const auto& channel, net::Message message) { on_message(channel, std::move(message)); },
          [this](const auto& channel, const Error& error) { break_channel(channel, error); }),
      parts_(state.copies, state.received),
      received_parts_(state.runtime.metrics.counter("rpc.tensor_parts.received")),
      refusals_(state.runtime.log, state.runtime.executor),
      broken_(state.runtime.log, state.runtime.executor) {}

void MessageReceiver::on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  try {
    const auto peer = state_.channels->peer_of(channel.get());
    if (peer) return dispatch(*peer, channel, {std::move(message)});
    if (state_.channels->is_shut(channel.get())) return;  // sent before this side closed the channel
    if (state_.stopping.load()) return;  // sent by known peers before they learned of the stop
    unknown_peers_.receive(channel, std::move(message));
  } catch (...) {
    break_channel(channel, to_error(std::current_exception()));
  }
}

/// For messages of a peer whose join is not known yet, the host has memory enough.
Buffer MessageReceiver::device_memory(const std::shared_ptr<net::Channel>& channel, std::uint32_t target,
                                      std::size_t size) {
  const auto peer = state_.channels->peer_of(channel.get());
  if (!peer) return {};
  if (!state_.device_memory) throw_invalid("a tensor arrived for a device that this worker did not agree to");
  const EnvironmentScope empty{Environment()};  // as in dispatch()
  try {
    return state_.device_memory->receive(*peer, target, size);
  } catch (...) {
    throw to_error(std::current_exception());
  }
}

/// Handles a message on the thread that polls, which may be a user's thread that waits. Resets the
/// environment: nothing of that thread's own work (inference mode, an autograd context) may affect what
/// others are sent.
void MessageReceiver::dispatch(PeerId peer, const std::shared_ptr<net::Channel>& channel,
                               ReceivedMessage message) {
  const EnvironmentScope empty{Environment()};
  auto call = std::make_shared<IncomingCall>();
  call->peer = peer.rank;
  call->incarnation = peer.incarnation;
  call->channel = channel;
  call->message = std::move(message);
  call->frame = wire::decode_frame(call->message.header, state_.wire);
  const wire::FrameHeader& header = call->frame.header;
  find_on_device(call->message);
  insert_shared(*call);
  if (header.type == TensorPart::kType) return receive_part(*call);
  insert_parts(*call);
  if ((header.flags & wire::kFlagReply) != 0) return receive_reply(peer, call->message, call->frame);
  if (header.type == Hello::kType) return;
  const TimePoint now = state_.runtime.executor.now();
  call->arrived = now;
  if (header.type == kCancelCall) return receive_cancel(*call);
  if ((header.flags & wire::kFlagHasDeadline) != 0) {
    call->deadline =
        state_.runtime.executor.deadline_in(Duration(std::max<std::int64_t>(header.remaining, 0)));
  }
  server_.receive(std::move(call));
}

void MessageReceiver::receive_part(IncomingCall& part) {
  wire::Payload payload;
  payload.value.assign(part.frame.value.begin(), part.frame.value.end());
  ReceivedMessage& message = part.message;
  std::optional<c10::Device> device;
  if (!message.on_device.empty()) device = message.on_device.front().device;
  try {
    parts_.receive(part.channel.get(), wire::from_payload<TensorPart>(payload), message.segments, device);
  } catch (const Error& error) {
    throw with_sender(part, error);
  }
  received_parts_.add(message.segments.size());
  if (!device) return;
  message.segments.clear();  // the sender waits for their memory
  state_.device_memory->send_returns();
}

Error MessageReceiver::with_sender(const IncomingCall& call, const Error& error) const {
  return Error(error.kind(), fmt::format("worker '{}' (rank {}) sent a tensor in parts: {}",
                                         state_.peers.name(call.peer), call.peer, error.message()));
}

void MessageReceiver::insert_shared(IncomingCall& call) {
  const auto* blob = call.frame.blob(kDeviceMemoryBlob);
  if (blob == nullptr) return;
  if (!state_.device_memory)
    throw_invalid("a message has tensors in device memory, which this worker never mapped");
  ReceivedMessage& message = call.message;
  state_.device_memory->insert(call.from(), blob->bytes, {message.segments, message.on_device});
}

void MessageReceiver::insert_parts(IncomingCall& call) {
  const auto* blob = call.frame.blob(kTensorPartsBlob);
  if (blob == nullptr) return;
  try {
    parts_.insert(call.channel.get(), blob->bytes, {call.message.segments, call.message.on_device});
  } catch (const Error& error) {
    throw with_sender(call, error);
  }
}

void MessageReceiver::receive_cancel(const IncomingCall& cancel) {
  const IncomingPtr served = state_.serving.find(cancel.channel.get(), cancel.frame.header.call);
  if (!served) return;
  if (!loop_.driven_by_caller()) return served->request_stop();
  // Not on the pool, all of whose threads may run the handlers that are to stop.
  loop_.at(Deadline(state_.runtime.executor.now()), [served] { served->request_stop(); });
}

void MessageReceiver::receive_reply(PeerId peer, ReceivedMessage& message, const wire::FrameView& frame) {
  auto call = state_.calls.take(frame.header.call, peer.rank);
  if (!call) {
    late_replies_.fetch_add(1);
    try {
      state_.references->driver().release_references(state_.references->from_handles(frame.handles, peer));
    } catch (const Error& error) {  // a reference in it was reported lost; no caller waits for it
      state_.runtime.log.info(fmt::format("reference in a late reply: {}", error.what()));
    }
    return;
  }
  wire::Payload payload;
  try {
    payload.value.assign(frame.value.begin(), frame.value.end());
    if ((frame.header.flags & wire::kFlagError) != 0) {
      auto error = calls_.annotate(*call, std::make_exception_ptr(received_error(frame, payload)));
      if (const auto* typed = frame.blob(kErrorBlob))
        error = state_.functions.errors().rebuild(typed->bytes, error);
      return call->completion->fail(error);
    }
    payload.references = state_.references->from_handles(frame.handles, peer);
    complete(*call, message, frame, payload);
  } catch (...) {
    call->completion->fail(calls_.annotate(*call, std::current_exception()));
  }
  call.reset();  // destroys its result, too, if no caller waits for it
  state_.references->driver().release_references(std::move(payload.references));
}

void MessageReceiver::complete(PendingCall& call, ReceivedMessage& message, const wire::FrameView& frame,
                               wire::Payload& payload) {
  const std::uint64_t id = frame.header.call;
  std::uint64_t bytes = message.header.size();
  for (const Buffer& segment : message.segments) bytes += segment.size;
  const device::StreamsScope streams(call.streams);  // those that the caller is going to use the results on
  if (call.peer == state_.self.rank) state_.copies.order_after_defaults(call.streams);
  payload.tensors =
      wire::unpack(frame.tensor_metadata, message.segments,
                   {.place = call.user_values ? state_.devices.results(call.peer, state_.peers) : nullptr,
                    .copies = &state_.copies,
                    .on_device = message.on_device});
  const CallInfo info{call.info.type, call.name, call.peer, id, true, call.site};
  for (Interceptor* interceptor : state_.interceptors) {
    if (const auto* blob = frame.blob(interceptor->name()))
      interceptor->incoming(info, payload.tensors, blob->bytes);
  }
  if (call.shown) {
    state_.runtime.spans.record(
        SpanKind::kCall, call.name, call.started,
        SpanLink{.id = id, .peer = static_cast<std::int32_t>(call.peer), .bytes = bytes});
  }
  call.completion->succeed(payload);
}

void MessageReceiver::on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  parts_.closed(channel.get());
  const bool shut = state_.channels->is_shut(channel.get());
  const auto peer = state_.channels->closed(channel.get());
  if (shut) return;
  unknown_peers_.closed(channel);
  if (loop_.driven_by_caller()) {
    loop_.at(Deadline(state_.runtime.executor.now()),
             [this, channel, peer, reason] { forget_channel(channel, peer, reason); });
    return;
  }
  forget_channel(channel, peer, reason);
}

void MessageReceiver::forget_channel(const std::shared_ptr<net::Channel>& channel,
                                     std::optional<std::uint32_t> peer, const Error& reason) {
  if (!peer) {
    state_.runtime.log.info(
        fmt::format("a connection from {} closed before its hello: {}", channel->peer(), reason.what()));
    return;
  }
  for (const IncomingPtr& call : state_.serving.of_channel(channel.get())) call->request_stop();
  const bool present = !state_.stopping.load() && state_.peers.is_present(*peer);
  // The messages of calls that are sent once more must arrive before the questions about the references in them.
  auto ask = [this, rank = *peer] {
    if (!state_.stopping.load() && state_.peers.is_present(rank)) state_.references->driver().on_broken(rank);
  };
  if (present && calls_.redial(channel, reason, ask)) return;
  if (present) ask();
  const Error error(
      reason.kind(),
      fmt::format("the connection to worker '{}' (rank {}) ended: {}; {}", state_.peers.name(*peer), *peer,
                  reason.message(),
                  present
                      ? state_.self.name +
                            " reports it; the world still counts it as a member, so the next call connects "
                            "again: if it fails, too, the network between the two is cut"
                      : "it died, or it left"));
  if (!present) return calls_.fail(state_.calls.take_channel(channel.get()), error);
  calls_.fail_channel_later(channel, error);
}

void MessageReceiver::on_refused(const std::string& peer, const Error& reason) {
  refusals_.write(fmt::format("rejected a connection from '{}': {}", peer, reason.message()));
}

void MessageReceiver::break_channel(const std::shared_ptr<net::Channel>& channel, const Error& error) {
  broken_.write(fmt::format("closing the connection to {}: {}", channel->peer(), error.what()));
  channel->close();
}

}  // namespace torchspan::rpc
