#include "rpc/agent/stopped_peers.h"

#include <fmt/format.h>
#include <utility>

#include "rpc/agent/request_sender.h"

namespace torchspan::rpc {
namespace {

constexpr Duration kCheckEvery = std::chrono::seconds(1);

}  // namespace

void StoppedPeers::watch() {
  if (state_.options.stopped_limit == Duration::zero() || !state_.channels || watching_.exchange(true))
    return;
  loop_.at(state_.runtime.executor.deadline_in(kCheckEvery), [this] { check(); });
}

void StoppedPeers::check() {
  const TimePoint now = state_.runtime.executor.now();
  const Duration limit = state_.options.stopped_limit;
  std::map<std::uint32_t, TimePoint> stopped;
  for (const std::uint32_t peer : state_.calls.peers()) {
    if (peer == state_.self.rank ||
        membership_->condition(static_cast<int>(peer)) != rendezvous::Condition::kStopped)
      continue;
    const auto before = since_.find(peer);
    stopped[peer] = before == since_.end() ? now : before->second;
    if (now - stopped[peer] < limit) continue;
    calls_.fail(
        state_.calls.take_peer_older(peer, now - limit),
        Error(
            ErrorKind::kDisconnected,
            fmt::format(
                "worker '{}' (rank {}) has been stopped, by a signal or a debugger, for {:.0f} s; continue "
                "it (kill -CONT) and call again, or allow more than {:g} s with TORCHSPAN_STOPPED_LIMIT (0: "
                "no limit)",
                state_.peers.name(peer), peer, to_seconds(now - stopped[peer]), to_seconds(limit))));
  }
  since_ = std::move(stopped);
  watching_.store(false);
  if (state_.calls.size() != 0) watch();
}

}  // namespace torchspan::rpc
