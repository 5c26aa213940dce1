#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/transport_loop.h"

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

}  // namespace torchspan::rpc
