#include "rpc/agent/message_sender.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include "device/api/tensors.h"
#include "rpc/calls/autocast_header.h"
#include "rpc/tensor_parts/messages.h"

namespace torchspan::rpc {
namespace {

/// How long to wait before devices are asked again whether a copy is complete, if no thread polls: doubled from the
/// first to the last.
constexpr Duration kFirstPause = std::chrono::microseconds(20);
constexpr Duration kLastPause = std::chrono::milliseconds(1);
/// How long a thread that replies waits for small copies.
constexpr Duration kSoon = std::chrono::microseconds(20);
/// How many messages a thread that polls asks for. Timers ask for the others.
constexpr std::size_t kMostAsked = 8;
/// A thread that polls may send a message itself if the transport copies at most so many bytes for it.
constexpr std::size_t kSmall = std::size_t{256} << 10;

bool is_small(const OutgoingMessage& out) {
  std::size_t bytes = 0;
  for (const Segment& segment : out.tensors.segments) {
    if (segment.device_target == 0) bytes += segment.size;
  }
  return bytes <= kSmall;
}

}  // namespace

CopyingMessages::CopyingMessages(AgentState& state, TransportLoop& loop, Counter& bytes_sent)
    : state_(state),
      loop_(loop),
      bytes_sent_(bytes_sent),
      split_(state.runtime.metrics.counter("rpc.tensor_parts.sent")) {}

void CopyingMessages::add(OutgoingMessage out, std::shared_ptr<net::Channel> channel, Deadline deadline,
                          UniqueFunction<void(OutgoingMessage&)> next) {
  CopyingPtr copying;
  try {
    copying = std::make_shared<Copying>();
    MutexLock lock(mutex_);
    if (drops_) return;
    messages_.emplace(last_number_ + 1, copying);
    copying->number = ++last_number_;
    copying->out = std::move(out);
    copying->channel = std::move(channel);
    copying->deadline = deadline;
    copying->next = std::move(next);
    count_.fetch_add(1);
  } catch (const std::exception&) {
    out.failure = std::make_exception_ptr(to_error(std::current_exception()));
    return next(out);
  }
  try {
    look_after(copying, kFirstPause);
  } catch (const std::exception&) {
    if (copying->busy.exchange(true)) return;  // a thread that polls has it
    copying->out.failure = std::make_exception_ptr(to_error(std::current_exception()));
    pass_on(copying);
  }
}

bool CopyingMessages::soon_ready(OutgoingMessage& out) const {
  Executor& executor = state_.runtime.executor;
  const TimePoint end = executor.now() + std::min(kSoon, executor.spin_limit());
  for (; out.split.empty() && executor.now() < end; executor.yield()) {
    if (out.ready()) return true;
  }
  return false;
}

/// The thread may be a user's that waits: nothing of its own work may affect what is sent.
void CopyingMessages::poll_copies() {
  if (count_.load(std::memory_order_relaxed) == 0 || looking_.exchange(true)) return;
  struct Looked {
    std::atomic<bool>& flag;
    ~Looked() { flag.store(false); }
  } const looked{looking_};
  std::vector<CopyingPtr> oldest;
  {
    MutexLock lock(mutex_);
    for (const auto& [number, copying] : messages_) {
      oldest.push_back(copying);
      if (oldest.size() == kMostAsked) break;
    }
  }
  const EnvironmentScope empty{Environment()};
  for (CopyingPtr& one : oldest) {
    if (ask(one) != Answer::kCopied) continue;
    if (is_small(one->out)) {
      pass_on(std::exchange(one, nullptr));
    } else {
      post(one);
    }
  }
}

/// Timers outlive the loop, so they do not hold the message, which may hold the agent.
void CopyingMessages::look_after(const CopyingPtr& copying, Duration pause) {
  const std::uint64_t turn = ++copying->turn;
  loop_.at(state_.runtime.executor.deadline_in(pause),
           [this, weak = std::weak_ptr<Copying>(copying), pause, turn] {
             const CopyingPtr one = weak.lock();
             if (!one || one->turn.load() != turn) return;
             if (ask(one) == Answer::kCopied) return post(one);
             if (one->turn.load() == turn) look_after(one, std::min(pause * 2, kLastPause));
           });
}

/// Sending a part may take longer than a thread that polls may be kept, so the pool does it.
CopyingMessages::Answer CopyingMessages::ask(const CopyingPtr& copying) {
  if (copying->busy.exchange(true)) return Answer::kBusy;
  OutgoingMessage& out = copying->out;
  try {
    const bool late = !out.split.empty() && copying->deadline.passed(state_.runtime.executor.now());
    if (late || std::ranges::any_of(out.split, [](const auto& tensor) { return tensor->can_advance(); })) {
      state_.continuations->post([this, alive = state_.backend.lock(), copying] { send_parts(copying); });
      return Answer::kBusy;
    }
    if (out.ready()) return Answer::kCopied;
  } catch (...) {  // the device has failed
    out.failure = std::make_exception_ptr(to_error(std::current_exception()));
    return Answer::kCopied;
  }
  copying->busy.store(false);
  return Answer::kWaits;
}

void CopyingMessages::send_parts(const CopyingPtr& copying) {
  OutgoingMessage& out = copying->out;
  try {
    if (copying->deadline.passed(state_.runtime.executor.now()))
      throw Error(ErrorKind::kTimedOut, "the deadline passed while parts of its tensors were sent");
    for (const SplitTensorPtr& tensor : out.split) {
      if (tensor->done()) continue;
      bytes_sent_.add(tensor->advance(copying->channel));
      if (tensor->done()) split_.add();
    }
    if (!out.ready()) {
      copying->busy.store(false);
      return look_after(copying, kFirstPause);
    }
  } catch (...) {
    out.failure = std::make_exception_ptr(to_error(std::current_exception()));
  }
  pass_on(copying);
}

void CopyingMessages::post(const CopyingPtr& copying) {
  state_.continuations->post([this, alive = state_.backend.lock(), copying] { pass_on(copying); });
}

/// Its tensors end here, on the thread that sent them.
void CopyingMessages::pass_on(const CopyingPtr& copying) {
  {
    MutexLock lock(mutex_);
    if (messages_.erase(copying->number) == 0) return;  // dropped
    count_.fetch_sub(1);
  }
  OutgoingMessage out = std::move(copying->out);
  std::exchange(copying->next, nullptr)(out);
}

void CopyingMessages::drop() {
  std::map<std::uint64_t, CopyingPtr> dropped;
  MutexLock lock(mutex_);
  drops_ = true;
  dropped.swap(messages_);
  count_.store(0);
}

namespace {

/// How long a reply waits when its channel is full, and how many wait at most before such channels are
/// closed.
constexpr Duration kFullPause = std::chrono::milliseconds(50);
constexpr std::size_t kMostUnsentReplies = 1u << 16;
/// Detaches every tensor of a call with gradients disabled.
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

/// Adds the segments that the connection carries from device to device, and blobs that say which segments the peer has
/// already. Places of tensors in device memory do not count those in parts.
void add_places(OutgoingMessage& out) {
  using TensorRoute = OutgoingMessage::TensorRoute;
  SharedPlaces shared;
  SplitPlaces split;
  std::size_t carried = 0;
  for (std::size_t i = 0; i < out.ways.size(); ++i) {
    const std::size_t segment = out.tensors.shared[i];
    switch (out.ways[i]) {
      case TensorRoute::kSplit:
        split.all.push_back({static_cast<std::uint32_t>(segment), out.split[split.all.size()]->number()});
        break;
      case TensorRoute::kLent:
        shared.all.push_back(out.lent[shared.all.size()]->place(segment - split.all.size()));
        break;
      case TensorRoute::kCarried: {
        const auto& [copy, target] = out.carried[carried++];
        const std::size_t place = segment - split.all.size() - shared.all.size();
        out.tensors.segments.insert(
            out.tensors.segments.begin() + static_cast<std::ptrdiff_t>(place),
            {static_cast<const std::byte*>(copy->data_ptr()), copy->nbytes(), copy, target});
        break;
      }
    }
  }
  if (!shared.all.empty()) out.frame.blobs.push_back({kDeviceMemoryBlob, wire::to_payload(shared).value});
  if (!split.all.empty()) out.frame.blobs.push_back({kTensorPartsBlob, wire::to_payload(split).value});
}

}  // namespace

MessageSender::MessageSender(
    AgentState& state, TransportLoop& loop, std::function<void(ReceivedMessage)> deliver_here,
    std::function<void(const std::shared_ptr<net::Channel>&, const Error&)> break_channel)
    : state_(state),
      loop_(loop),
      deliver_here_(std::move(deliver_here)),
      break_channel_(std::move(break_channel)),
      bytes_sent_(state.runtime.metrics.counter("rpc.bytes_sent")),
      parts_(state.copies.events(),
             [&state](const net::Channel* channel) { return state.channels->peer_of(channel).has_value(); }),
      copying_(state, loop, bytes_sent_) {}

OutgoingMessage MessageSender::prepare(const CallInfo& info, PeerId to, wire::Payload& payload,
                                       TensorUse use) {
  const bool user_values = use.user_values;
  OutgoingMessage out;
  const Protocol protocol = state_.peers.protocol(to.rank);
  out.frame.header.version = protocol.version;
  try {
    if (user_values && info.no_grad) {
      detach_all(payload.tensors);
      if (!info.reply) out.frame.blobs.push_back({kNoGradBlob, Bytes(1)});
    } else if (user_values) {
      for (Interceptor* interceptor : state_.interceptors) {
        if (!protocol.has(interceptor->feature())) continue;
        Bytes header = interceptor->outgoing(info, payload.tensors);
        if (header.empty()) continue;
        out.frame.header.features |= interceptor->feature();
        out.frame.blobs.push_back({std::string(interceptor->name()), std::move(header)});
      }
      if (detach_graph_tensors(payload.tensors)) warn_of_detached(info);
    }
    const bool arguments = user_values && !info.reply;
    if (Bytes autocast = arguments ? encode_autocast() : Bytes(); !autocast.empty())
      out.frame.blobs.push_back({kAutocastBlob, std::move(autocast)});
    pack(info, to, payload, use, out);
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

void MessageSender::pack(const CallInfo& info, PeerId to, wire::Payload& payload, TensorUse use,
                         OutgoingMessage& out) {
  wire::PackOptions options{.copies = &state_.copies};
  if (use.user_values && !info.reply) options.place = state_.devices.arguments(info.peer, state_.peers);
  if (device::has_streams())
    options.share = to == state_.id() ? share_with_itself(use, out) : share_with_peer(info, to, use, out);
  out.tensors = wire::pack(payload.tensors, std::move(options));
  if (!out.ways.empty()) add_places(out);
  // It is sent later, or once more on another channel, when the caller may have changed its tensors.
  const bool may_repeat = use.user_values && use.channel != nullptr && !use.channel->opened();
  if (may_repeat || !out.ready()) out.tensors.own_memory();
}

/// Tensors whose device on the peer is known may go through memory that the peer maps, or over a connection that carries
/// device memory. Other large ones go in parts.
MessageSender::Share MessageSender::share_with_peer(const CallInfo& info, PeerId to, TensorUse use,
                                                    OutgoingMessage& out) {
  return [this, &info, to, use, &out](const at::Tensor& tensor, device::PendingCopies& copies) {
    using TensorRoute = OutgoingMessage::TensorRoute;
    const auto there = state_.device_memory ? device_there(info, use, tensor.device()) : std::nullopt;
    DeviceMemory::Route route;
    if (there)
      route = state_.device_memory->route_to(to, tensor, *there, use.channel->carries_device_memory());
    if (route.lent) {
      at::Tensor view = route.lent->view_like(tensor);
      state_.copies.share(tensor, view, copies);
      out.lent.push_back(std::move(route.lent));
      out.ways.push_back(TensorRoute::kLent);
      return view;
    }
    if (route.device_target != 0) {
      at::Tensor copy = copy_on_device(tensor, copies);
      const TensorPtr kept(new at::Tensor(copy), [room = std::move(route.room)](at::Tensor* sent) mutable {
        delete sent;
        room.reset();
      });
      out.carried.push_back({kept, route.device_target});
      out.ways.push_back(TensorRoute::kCarried);
      return copy;
    }
    SplitTensorPtr parts = split(to, tensor, there, out);
    if (!parts) return at::Tensor();
    at::Tensor captured = parts->captured();
    out.split.push_back(std::move(parts));
    out.ways.push_back(TensorRoute::kSplit);
    return captured;
  };
}

/// A dense copy with the tensor's values after the work of this thread's current stream so far.
at::Tensor MessageSender::copy_on_device(const at::Tensor& tensor, device::PendingCopies& copies) {
  const c10::InferenceMode normal(false);  // the receiver may differentiate it
  at::Tensor copy = at::empty_strided(tensor.sizes(), device::dense_strides_like(tensor), tensor.options());
  state_.copies.share(tensor, copy, copies);
  return copy;
}

/// Null if the tensor is small.
SplitTensorPtr MessageSender::split(PeerId to, const at::Tensor& tensor, std::optional<c10::Device> there,
                                    const OutgoingMessage& out) {
  std::optional<SharedArea> shared;
  if (there) shared = state_.device_memory->area_to(to, tensor.device(), *there);
  return parts_.split(to, tensor, {state_.instance, out.frame.header.version}, shared);
}

/// A worker's tensors to itself are copied on their devices. The receiver takes the copy.
MessageSender::Share MessageSender::share_with_itself(TensorUse use, OutgoingMessage& out) {
  if (!use.user_values && use.place.by == DevicePlace::By::kHost) return nullptr;
  return [this, &out](const at::Tensor& tensor, device::PendingCopies& copies) {
    at::Tensor copy = copy_on_device(tensor, copies);
    out.captured.push_back(std::make_shared<at::Tensor>(copy));
    return copy;
  };
}

/// The device on which the peer uses a tensor of a device here; the CPU: where the peer's device map places it.
/// Nullopt: the tensor must go through host memory.
std::optional<c10::Device> MessageSender::device_there(const CallInfo& info, TensorUse use,
                                                       c10::Device here) const {
  using By = DevicePlace::By;
  const By by = !use.user_values ? use.place.by : info.reply ? By::kResults : By::kArguments;
  switch (by) {
    case By::kHost:
      break;
    case By::kArguments: {
      const auto there = state_.devices.mapped(info.peer, state_.peers, here);
      if (there && !there->is_cpu()) return there;
      break;
    }
    case By::kResults:
      return c10::Device(c10::kCPU);
    case By::kDevice:
      if (!use.place.device.is_cpu()) return use.place.device;
      break;
  }
  return std::nullopt;
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

void MessageSender::send_frame(const std::shared_ptr<net::Channel>& channel, const wire::Frame& frame,
                               const wire::PackedTensors& tensors, std::span<const TensorPtr> captured) {
  Bytes header = wire::encode_frame(frame);
  std::uint64_t bytes = header.size();
  for (const Segment& segment : tensors.segments) bytes += segment.size;
  bytes_sent_.add(bytes);
  if (channel) return channel->send(header, tensors.segments);
  loop_back(header, tensors, captured);
}

/// The peer may return the memory before send() has returned.
void MessageSender::send(const std::shared_ptr<net::Channel>& channel, const OutgoingMessage& out) {
  if (out.failure) std::rethrow_exception(out.failure);
  for (const SplitTensorPtr& tensor : out.split) {
    if (!tensor->sent_on(channel.get()))
      throw Error(ErrorKind::kDisconnected, "the connection ended after parts of its tensors were sent");
  }
  for (const LentTensorPtr& lent : out.lent) lent->lend();
  try {
    send_frame(channel, out.frame, out.tensors, out.captured);
  } catch (...) {
    for (const LentTensorPtr& lent : out.lent) lent->take_back();
    throw;
  }
  for (const SplitTensorPtr& tensor : out.split) tensor->message_sent();
}

/// Delivers a message to this worker itself along the whole path: copies its bytes like those that cross a
/// wire. Tensors on devices were copied before; the receiver takes them out of `captured`.
void MessageSender::loop_back(const Bytes& header, const wire::PackedTensors& tensors,
                              std::span<const TensorPtr> captured) {
  ReceivedMessage message{{header, {}}};
  for (const Segment& segment : tensors.segments) {
    Buffer buffer = allocate_buffer(segment.size);
    if (segment.size != 0) std::memcpy(buffer.data, segment.data, segment.size);
    message.segments.push_back(std::move(buffer));
  }
  for (std::size_t i = 0; i < captured.size(); ++i) {
    const TensorPtr& tensor = captured[i];
    const Buffer buffer{static_cast<std::byte*>(tensor->data_ptr()), tensor->nbytes(), tensor};
    const std::size_t index = tensors.shared[i];
    message.segments.insert(message.segments.begin() + static_cast<std::ptrdiff_t>(index), buffer);
    message.on_device.push_back({index, tensor->device(), wire::DeviceSegment::Memory::kTensor});
  }
  deliver_here_(std::move(message));
}

void MessageSender::send_reply(SmallReply reply) {
  try {
    return send(reply.channel, reply.frame);
  } catch (const std::exception&) {
    const Error error = to_error(std::current_exception());
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
  loop_.after(kFullPause, state_.continuations,
              [this, backend = state_.backend, reply = std::move(reply)]() mutable {
                const auto alive = backend.lock();
                if (!alive) return;
                unsent_replies_.fetch_sub(1);
                send_reply(std::move(reply));
              });
}

}  // namespace torchspan::rpc
