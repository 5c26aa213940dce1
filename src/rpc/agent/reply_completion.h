#pragma once
#include <atomic>
#include <memory>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/message_sender.h"

namespace torchspan::rpc {

class RequestServer;

/// Sends the reply of a request, once. Keeps the agent alive.
class ReplyCompletion final : public Completion, public std::enable_shared_from_this<ReplyCompletion> {
 public:
  ReplyCompletion(AgentState& state, MessageSender& sender, RequestServer& server, IncomingPtr call)
      : agent_(state.endpoint.lock()),
        state_(state),
        sender_(sender),
        server_(server),
        call_(std::move(call)) {}
  /// Fails the call if it was not answered.
  ~ReplyCompletion() override;
  void succeed(wire::Payload& reply) override;
  void fail(std::exception_ptr error) override;

 private:
  void try_to_send(const CallInfo& info, OutgoingMessage& out);
  void send(const CallInfo& info, OutgoingMessage& out);

  const std::shared_ptr<Endpoint> agent_;
  AgentState& state_;
  MessageSender& sender_;
  RequestServer& server_;
  IncomingPtr call_;
  std::atomic<bool> sent_{false};
};

}  // namespace torchspan::rpc
