#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rpc/extension.h>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/transport_loop.h"
#include "rpc/device_memory/lent_tensor.h"
#include "rpc/peers/peer_table.h"
#include "rpc/tensor_parts/outgoing_parts.h"
#include "wire/api/tensors.h"

namespace torchspan::rpc {

using TensorPtr = std::shared_ptr<at::Tensor>;

/// A message to be sent: its frame, and the tensors that the frame describes.
struct OutgoingMessage {
  wire::Frame frame;
  std::vector<TensorPtr> captured =
      {};  ///< to this worker itself: copies on their devices, which the receiver takes
  std::vector<LentTensorPtr> lent = {};    ///< memory of some tensors, freed after the copies in `tensors`
  std::vector<SplitTensorPtr> split = {};  ///< tensors that are sent in parts, before the frame
  /// A tensor that the connection carries from device to device.
  struct Carried {
    TensorPtr copy;
    std::uint32_t target = 0;  ///< Segment::device_target
  };
  std::vector<Carried> carried = {};
  enum class TensorRoute : std::uint8_t { kLent, kSplit, kCarried };
  std::vector<TensorRoute> ways = {};  ///< of the tensors in these three lists, in the order of the message
  wire::PackedTensors tensors = {};
  std::exception_ptr failure = nullptr;  ///< an Error: why not all parts were sent

  /// Whether the frame may be sent: its tensors are in host memory, or with the peer.
  bool ready() {
    return tensors.copies.complete() &&
           std::ranges::all_of(split, [](const SplitTensorPtr& tensor) { return tensor->done(); });
  }
};

/// The message of a call that was queued on a channel that was not open: it has reached nobody, and can be sent on another
/// channel to the same process.
struct UnsentCall {
  OutgoingMessage out;
  PeerId peer;
  bool creates = false;  ///< its first handle is that of the reference that it creates
  std::shared_ptr<net::Channel> channel;
  std::string first_failure = {};
  std::string failure = {};  ///< why attempts to connect failed: the first reason, and the last one
};

/// Messages whose tensors are still being copied from devices, or sent in parts. Thread-safe.
class CopyingMessages {
 public:
  /// `bytes_sent` counts the bytes of parts.
  CopyingMessages(AgentState& state, TransportLoop& loop, Counter& bytes_sent);

  /// Waits, at most for some microseconds, until the message may be sent. Returns whether it may: small tensors of a
  /// device that is idle are copied sooner than a thread of the pool would wake up.
  bool soon_ready(OutgoingMessage& out) const;
  /// Calls `next` with the message when it may be sent: on the pool, or on a thread that polls. Sends parts of large
  /// tensors to `channel` meanwhile; a failure, or a deadline that passed, is in OutgoingMessage::failure then.
  void add(OutgoingMessage out, std::shared_ptr<net::Channel> channel, Deadline deadline,
           UniqueFunction<void(OutgoingMessage&)> next);
  /// Passes on the oldest messages if they may be sent now; the pool sends parts and large ones. Threads that poll call
  /// it often.
  void poll_copies();
  /// Drops all messages, also later ones; after the loop has stopped.
  void drop();

 private:
  struct Copying {
    OutgoingMessage out;
    std::shared_ptr<net::Channel> channel;
    Deadline deadline;
    UniqueFunction<void(OutgoingMessage&)> next;
    std::uint64_t number = 0;             ///< in the order of add()
    std::atomic<bool> busy = false;       ///< a thread asks the devices, sends parts, or has taken it
    std::atomic<std::uint64_t> turn = 0;  ///< of the timer that counts
  };
  using CopyingPtr = std::shared_ptr<Copying>;
  enum class Answer : std::uint8_t { kWaits, kBusy, kCopied };
  /// Asks the devices. One thread gets kCopied, and must pass the message on or post it.
  Answer ask(const CopyingPtr& copying);
  void look_after(const CopyingPtr& copying, Duration pause);
  void send_parts(const CopyingPtr& copying);
  void post(const CopyingPtr& copying);
  void pass_on(const CopyingPtr& copying);

  AgentState& state_;
  TransportLoop& loop_;
  Counter& bytes_sent_;
  Counter& split_;  ///< tensors that were sent in parts
  Mutex mutex_;
  std::map<std::uint64_t, CopyingPtr> messages_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t last_number_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  bool drops_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::atomic<std::size_t> count_{0};  ///< of `messages_`
  std::atomic<bool> looking_{false};   ///< one thread at a time
};

/// Names the blob of a request whose caller disabled gradients.
inline constexpr const char* kNoGradBlob = "rpc.no_grad";

/// What the tensors of a message to be sent are.
struct TensorUse {
  bool user_values = false;               ///< interceptors see them
  DevicePlace place = {};                 ///< Request::place
  const net::Channel* channel = nullptr;  ///< on which it is going to be sent; null: to this worker itself
};

/// A reply that a call failed, or another small reply that must arrive.
struct SmallReply {
  std::shared_ptr<net::Channel> channel;
  wire::Frame frame;
  std::string call;   ///< for errors
  Deadline deadline;  ///< the caller's; after it, no caller waits
};

/// Turns payloads into frames and puts frames onto channels. Thread-safe.
class MessageSender {
 public:
  /// `deliver_here` receives messages to this worker itself; `break_channel` closes an unusable channel.
  MessageSender(AgentState& state, TransportLoop& loop, std::function<void(ReceivedMessage)> deliver_here,
                std::function<void(const std::shared_ptr<net::Channel>&, const Error&)> break_channel);

  /// Applies the interceptors and packs references and tensors. If the send fails, call undo().
  OutgoingMessage prepare(const CallInfo& info, PeerId to, wire::Payload& payload, TensorUse use);
  void undo(const CallInfo& info, const wire::Frame& frame);
  /// Sends to `channel`; null means this worker itself. Throws Error if the channel does not accept it.
  void send(const std::shared_ptr<net::Channel>& channel, const OutgoingMessage& out);
  /// The same for a message without tensors.
  void send(const std::shared_ptr<net::Channel>& channel, const wire::Frame& frame) {
    send_frame(channel, frame, {}, {});
  }
  /// Messages that wait until they may be sent.
  CopyingMessages& copying() { return copying_; }
  /// Sends now, or as soon as the channel has room: a caller without a deadline waits until the reply
  /// arrives.
  void send_reply(SmallReply reply);
  /// Frees what was kept for a peer.
  void departed(PeerId peer) { parts_.departed(peer); }

 private:
  using Share = std::function<at::Tensor(const at::Tensor&, device::PendingCopies&)>;
  void pack(const CallInfo& info, PeerId to, wire::Payload& payload, TensorUse use, OutgoingMessage& out);
  Share share_with_peer(const CallInfo& info, PeerId to, TensorUse use, OutgoingMessage& out);
  Share share_with_itself(TensorUse use, OutgoingMessage& out);
  SplitTensorPtr split(PeerId to, const at::Tensor& tensor, std::optional<c10::Device> there,
                       const OutgoingMessage& out);
  std::optional<c10::Device> device_there(const CallInfo& info, TensorUse use, c10::Device here) const;
  at::Tensor copy_on_device(const at::Tensor& tensor, device::PendingCopies& copies);
  void send_frame(const std::shared_ptr<net::Channel>& channel, const wire::Frame& frame,
                  const wire::PackedTensors& tensors, std::span<const TensorPtr> captured);
  void loop_back(const Bytes& header, const wire::PackedTensors& tensors,
                 std::span<const TensorPtr> captured);
  void warn_of_detached(const CallInfo& info);

  AgentState& state_;
  TransportLoop& loop_;
  const std::function<void(ReceivedMessage)> deliver_here_;
  const std::function<void(const std::shared_ptr<net::Channel>&, const Error&)> break_channel_;
  Counter& bytes_sent_;  ///< frames and tensors, retries included
  OutgoingParts parts_;
  CopyingMessages copying_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<std::size_t> unsent_replies_{0};
  std::atomic<bool> warned_of_detached_{false};
};

}  // namespace torchspan::rpc
