#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>

#include <torchspan/detail/rendezvous/membership.h>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/transport_loop.h"

namespace torchspan::rpc {

class RequestSender;

/// Fails calls to processes that a signal or a debugger stopped. Their connections stay open, so the calls
/// would otherwise wait as long as the process is stopped. Runs while calls wait for replies.
class StoppedPeers {
 public:
  StoppedPeers(AgentState& state, TransportLoop& loop, RequestSender& calls)
      : state_(state), loop_(loop), calls_(calls) {}
  /// Sets the membership, before the first call.
  void start(std::shared_ptr<rendezvous::Membership> membership) { membership_ = std::move(membership); }
  /// Drops the membership, after the loop has ended.
  void end() { membership_.reset(); }
  /// Starts to check, unless checks already run. Thread-safe.
  void watch();

 private:
  void check();

  AgentState& state_;
  TransportLoop& loop_;
  RequestSender& calls_;
  std::shared_ptr<rendezvous::Membership> membership_;
  std::atomic<bool> watching_{false};
  std::map<std::uint32_t, TimePoint> since_;  ///< only the loop's thread uses it
};

}  // namespace torchspan::rpc
