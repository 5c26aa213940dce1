#include "rpc/agent/message_sender.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <span>
#include <utility>

#include "rpc/calls/autocast_header.h"

namespace torchspan::rpc {
namespace {

/// How long a reply waits when its channel is full, and how many wait at most before such channels are
/// closed.
constexpr Duration kFullPause = std::chrono::milliseconds(50);
constexpr std::size_t kMostUnsentReplies = 1u << 16;
/// How long to wait before devices are asked again whether a copy is complete: doubled from the first to the
/// last.
constexpr Duration kFirstCopyPause = std::chrono::microseconds(20);
constexpr Duration kLastCopyPause = std::chrono::milliseconds(1);

/// Detaches every tensor of a call that wants no gradients.
void detach_all(std::span<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) tensor = tensor.detach();
  }
}

/// Detaches tensors inside a graph that no interceptor replaced: the graph does not reach other workers.
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

MessageSender::MessageSender(
    AgentState& state, TransportLoop& loop, std::function<void(net::Message)> deliver_here,
    std::function<void(const std::shared_ptr<net::Channel>&, const Error&)> break_channel)
    : state_(state),
      loop_(loop),
      deliver_here_(std::move(deliver_here)),
      break_channel_(std::move(break_channel)),
      bytes_sent_(state.runtime.metrics.counter("rpc.bytes_sent")) {}

OutgoingMessage MessageSender::prepare(const CallInfo& info, PeerId to, wire::Payload& payload,
                                       bool user_values) {
  OutgoingMessage out;
  try {
    if (user_values && info.no_grad) {
      detach_all(payload.tensors);
      if (!info.reply) out.frame.blobs.push_back({kNoGradBlob, Bytes(1)});
    } else if (user_values) {
      for (Interceptor* interceptor : state_.interceptors) {
        Bytes header = interceptor->outgoing(info, payload.tensors);
        if (!header.empty()) out.frame.blobs.push_back({std::string(interceptor->name()), std::move(header)});
      }
      if (detach_graph_tensors(payload.tensors)) warn_of_detached(info);
    }
    const bool arguments = user_values && !info.reply;
    if (Bytes autocast = arguments ? encode_autocast() : Bytes(); !autocast.empty())
      out.frame.blobs.push_back({kAutocastBlob, std::move(autocast)});
    pack(info, to, payload, user_values, out);
    out.frame.handles = state_.references->to_handles(payload.references, to);
  } catch (...) {
    undo(info, out.frame);
    throw;
  }
  out.frame.value = std::move(payload.value);
  out.frame.tensor_metadata = std::move(out.tensors.metadata);
  out.frame.header.instance = state_.instance;
  out.frame.header.sequence = ++sequence_;
  out.frame.header.call = info.call;
  return out;
}

/// Arguments whose device on the peer is known, and results, may go through memory that the peer maps.
void MessageSender::pack(const CallInfo& info, PeerId to, wire::Payload& payload, bool user_values,
                         OutgoingMessage& out) {
  wire::PackOptions options{.copies = &state_.copies};
  if (user_values && !info.reply) options.place = state_.devices.arguments(info.peer, state_.peers);
  if (user_values && state_.device_memory && (info.reply || options.place)) {
    options.share = [this, to, &out, place = options.place](const at::Tensor& tensor,
                                                            device::PendingCopies& copies) {
      const c10::Device there = place ? place(tensor.device()) : c10::Device(c10::kCPU);
      if (place && there.is_cpu()) return at::Tensor();
      LentTensorPtr lent = state_.device_memory->share(to, tensor, there);
      if (!lent) return at::Tensor();
      at::Tensor view = lent->view_like(tensor);
      out.lent.push_back(std::move(lent));
      state_.copies.share(tensor, view, copies);
      return view;
    };
  }
  out.tensors = wire::pack(payload.tensors, std::move(options));
  if (out.lent.empty()) return;
  SharedPlaces places;
  for (std::size_t i = 0; i < out.lent.size(); ++i)
    places.all.push_back(out.lent[i]->place(out.tensors.shared[i]));
  out.frame.blobs.push_back({kDeviceMemoryBlob, wire::to_payload(places).value});
}

void MessageSender::undo(const CallInfo& info, const wire::Frame& frame) {
  state_.references->undo(frame.handles);
  for (const wire::NamedBlob& blob : frame.blobs) {
    for (Interceptor* interceptor : state_.interceptors) {
      if (interceptor->name() == blob.name) interceptor->undo(info, blob.bytes);
    }
  }
}

void MessageSender::warn_of_detached(const CallInfo& info) {
  state_.runtime.metrics.counter("rpc.detached_tensors").add();
  if (warned_of_detached_.exchange(true)) return;
  const std::string site = info.reply ? "" : site_text(info.site);
  state_.runtime.log.warning(fmt::format(
      "tensors of '{}' {} worker '{}'{} are part of an autograd graph and were sent detached, because the "
      "call was made outside an autograd::Context, or in one that had ended: gradients do not cross workers "
      "then. "
      "Threads that the program starts need an autograd::ContextScope; for evaluation, make calls "
      "with({{.no_grad = true}}) (logged once)",
      info.name, info.reply ? "back to" : "to", state_.peers.name(info.peer),
      site.empty() ? "" : fmt::format(", called at {},", site)));
}

void MessageSender::send(const std::shared_ptr<net::Channel>& channel, const wire::Frame& frame,
                         const wire::PackedTensors& tensors) {
  Bytes header = wire::encode_frame(frame);
  std::uint64_t bytes = header.size();
  for (const Segment& segment : tensors.segments) bytes += segment.size;
  bytes_sent_.add(bytes);
  if (channel) return channel->send(header, tensors.segments);
  loop_back(header, tensors);
}

/// The peer may return the memory before send() has returned.
void MessageSender::send(const std::shared_ptr<net::Channel>& channel, const OutgoingMessage& out) {
  for (const LentTensorPtr& lent : out.lent) lent->lend();
  try {
    send(channel, out.frame, out.tensors);
  } catch (...) {
    for (const LentTensorPtr& lent : out.lent) lent->take_back();
    throw;
  }
}

void MessageSender::when_copied(OutgoingMessage out, UniqueFunction<void(OutgoingMessage&)> next) {
  const auto copying = std::make_shared<Copying>(Copying{std::move(out), std::move(next)});
  {
    MutexLock lock(mutex_);
    if (drops_copying_) return;
    copying_.insert(copying);
  }
  poll_copies(copying, kFirstCopyPause);
}

/// Timers outlive the loop, so they do not hold the message, which may hold the agent.
void MessageSender::poll_copies(const CopyingPtr& copying, Duration pause) {
  loop_.at(state_.runtime.executor.deadline_in(pause), [this, weak = std::weak_ptr<Copying>(copying), pause] {
    CopyingPtr one = weak.lock();
    if (!one) return;
    if (!one->out.tensors.copies.complete()) return poll_copies(one, std::min(pause * 2, kLastCopyPause));
    {
      MutexLock lock(mutex_);
      copying_.erase(one);
    }
    state_.host->post([alive = state_.endpoint.lock(), one = std::move(one)] { one->next(one->out); });
  });
}

void MessageSender::drop_copying() {
  std::set<CopyingPtr> dropped;
  MutexLock lock(mutex_);
  drops_copying_ = true;
  dropped.swap(copying_);
}

/// Delivers a message to this worker itself along the whole path: copies its bytes like those that cross a
/// wire.
void MessageSender::loop_back(const Bytes& header, const wire::PackedTensors& tensors) {
  net::Message message{header, {}};
  for (const Segment& segment : tensors.segments) {
    Buffer buffer = allocate_buffer(segment.size);
    if (segment.size != 0) std::memcpy(buffer.data, segment.data, segment.size);
    message.segments.push_back(std::move(buffer));
  }
  deliver_here_(std::move(message));
}

void MessageSender::send_reply(SmallReply reply) {
  try {
    return send(reply.channel, reply.frame, {});
  } catch (const Error& error) {
    const bool full = error.kind() == ErrorKind::kOverloaded && !state_.stopping.load();
    if (!full || reply.deadline.passed(state_.runtime.executor.now())) {
      return state_.runtime.log.info(
          fmt::format("the reply to '{}' could not be sent: {}", reply.call, error.what()));
    }
    if (unsent_replies_.fetch_add(1) >= kMostUnsentReplies) {
      unsent_replies_.fetch_sub(1);
      return break_channel_(reply.channel, error);  // the caller gets an error
    }
  }
  loop_.after(kFullPause, state_.host,
              [this, endpoint = state_.endpoint, reply = std::move(reply)]() mutable {
                const auto alive = endpoint.lock();
                if (!alive) return;
                unsent_replies_.fetch_sub(1);
                send_reply(std::move(reply));
              });
}

}  // namespace torchspan::rpc
