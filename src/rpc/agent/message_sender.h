#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torchspan/detail/rpc/extension.h>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/copying_messages.h"
#include "rpc/agent/outgoing_message.h"
#include "rpc/agent/transport_loop.h"
#include "rpc/tensor_parts/outgoing_parts.h"

namespace torchspan::rpc {

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
