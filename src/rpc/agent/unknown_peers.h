#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/transport_loop.h"

namespace torchspan::rpc {

/// Identifies connections by their hello. A peer that this worker has not yet heard of, because the news of
/// its joining is still on its way, waits for a limited time; its messages are kept.
class UnknownPeers {
 public:
  using Deliver = std::function<void(const std::shared_ptr<net::Channel>&, net::Message)>;
  using Reject = std::function<void(const std::shared_ptr<net::Channel>&, const Error&)>;
  /// `deliver` gets what a peer sent that is known now; `reject` ends the connection of one that is not.
  UnknownPeers(AgentState& state, TransportLoop& loop, Deliver deliver, Reject reject);

  /// A message of a connection without a known peer. Throws Error if it is no hello. Inside a poll.
  void receive(const std::shared_ptr<net::Channel>& channel, net::Message message);
  /// Some peer joined: delivers the messages of peers that are known now. On the loop's thread.
  void admit();
  /// Inside a poll.
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
  std::vector<Waiting> waiting_;  ///< the holder of the driver lock
};

}  // namespace torchspan::rpc
