#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/api/rate_limited_warning.h"
#include "rpc/agent/agent_state.h"
#include "rpc/agent/request_sender.h"
#include "rpc/agent/request_server.h"
#include "rpc/agent/transport_loop.h"
#include "rpc/tensor_parts/incoming_parts.h"

namespace torchspan::rpc {

/// Identifies connections by their hello. Keeps the messages of a peer whose join this worker has not learned
/// yet, for a limited time.
class UnknownPeers {
 public:
  using Deliver = std::function<void(const std::shared_ptr<net::Channel>&, net::Message)>;
  using Reject = std::function<void(const std::shared_ptr<net::Channel>&, const Error&)>;
  /// `deliver` receives the messages of a peer that became known; `reject` closes the connection of a peer
  /// that stays unknown.
  UnknownPeers(AgentState& state, TransportLoop& loop, Deliver deliver, Reject reject);

  /// Receives a message of a connection without a known peer. Throws Error if the first one is not a hello.
  /// Call it inside a poll.
  void receive(const std::shared_ptr<net::Channel>& channel, net::Message message);
  /// Delivers the messages of peers that are known now, after a peer joined. On the loop's thread.
  void admit();
  /// Forgets a closed connection. Call it inside a poll.
  void closed(const std::shared_ptr<net::Channel>& channel);
  void clear();

 private:
  struct Waiting {
    std::shared_ptr<net::Channel> channel;
    Hello hello;
    Deadline until;
    std::vector<net::Message> messages;
    std::uint64_t bytes = 0;
  };

  AgentState& state_;
  TransportLoop& loop_;
  const Deliver deliver_;
  const Reject reject_;
  std::vector<Waiting> waiting_;  ///< the holder of the driver lock uses it
};

/// Handles what the transport reports: decodes messages, passes replies to the calls that wait and requests
/// to the server. Runs on the thread that polls.
class MessageReceiver final : public net::Handler {
 public:
  MessageReceiver(AgentState& state, TransportLoop& loop, RequestSender& calls, RequestServer& server);

  /// Delivers a message of this worker to itself.
  void deliver_here(ReceivedMessage message) { dispatch(state_.id(), nullptr, std::move(message)); }
  /// Closes a channel whose peer broke the protocol.
  void break_channel(const std::shared_ptr<net::Channel>& channel, const Error& error);
  UnknownPeers& unknown_peers() { return unknown_peers_; }
  /// Returns how many replies arrived after their call had ended.
  std::uint64_t late_replies() const { return late_replies_.load(); }

  // net::Handler
  void on_accepted(const std::shared_ptr<net::Channel>& channel) override {}
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override;
  Buffer device_memory(const std::shared_ptr<net::Channel>& channel, std::uint32_t target,
                       std::size_t size) override;
  void on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) override;
  void on_refused(const std::string& peer, const Error& reason) override;

 private:
  void dispatch(PeerId peer, const std::shared_ptr<net::Channel>& channel, ReceivedMessage message);
  void receive_part(IncomingCall& part);
  Error with_sender(const IncomingCall& call, const Error& error) const;
  /// Completes the message's segments by those that are in shared memory, or that came before the frame.
  void insert_shared(IncomingCall& call);
  void insert_parts(IncomingCall& call);
  void receive_cancel(const IncomingCall& cancel);
  void receive_reply(PeerId peer, ReceivedMessage& message, const wire::FrameView& frame);
  void complete(PendingCall& call, ReceivedMessage& message, const wire::FrameView& frame,
                wire::Payload& payload);
  void forget_channel(const std::shared_ptr<net::Channel>& channel, std::optional<std::uint32_t> peer,
                      const Error& reason);

  AgentState& state_;
  TransportLoop& loop_;
  RequestSender& calls_;
  RequestServer& server_;
  UnknownPeers unknown_peers_;
  IncomingParts parts_;
  Counter& received_parts_;  ///< parts of tensors
  RateLimitedWarning refusals_;
  RateLimitedWarning broken_;  ///< connections that this worker closes
  std::atomic<std::uint64_t> late_replies_{0};
};

}  // namespace torchspan::rpc
