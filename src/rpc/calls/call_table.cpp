#include "rpc/calls/call_table.h"

#include <algorithm>
#include <fmt/format.h>

namespace torchspan::rpc {

bool CallTable::add(std::uint64_t id, PendingCall& call) {
  MutexLock lock(mutex_);
  PerPeer& waiting = per_peer_[call.peer];
  if (call.user_values && waiting.user_calls >= most_per_peer_) {
    throw Error(ErrorKind::kOverloaded,
                fmt::format("{} calls to this worker wait for replies, which is the limit "
                            "(WorkerOptions::max_pending_calls); wait for some of them before you make more",
                            waiting.user_calls));
  }
  ++waiting.calls;
  if (call.user_values) ++waiting.user_calls;
  const Deadline deadline = call.deadline;
  auto [it, fresh] = calls_.emplace(id, Entry{std::move(call), deadlines_.end()});
  if (deadline.is_never()) return false;
  it->second.deadline = deadlines_.emplace(deadline, id);
  return it->second.deadline == deadlines_.begin();
}

bool CallTable::attach(std::uint64_t id, std::unique_ptr<StopHook>& hook) {
  MutexLock lock(mutex_);
  auto it = calls_.find(id);
  if (it == calls_.end()) return false;
  auto& hooks = it->second.call.stop_hooks;
  (hooks[0] ? hooks[1] : hooks[0]) = std::move(hook);
  return true;
}

PendingCall CallTable::remove(Entries::iterator it) {
  if (it->second.deadline != deadlines_.end()) deadlines_.erase(it->second.deadline);
  PendingCall call = std::move(it->second.call);
  const auto peer = per_peer_.find(call.peer);
  if (call.user_values) --peer->second.user_calls;
  if (--peer->second.calls == 0) per_peer_.erase(peer);
  calls_.erase(it);
  return call;
}

std::optional<PendingCall> CallTable::take(std::uint64_t id) {
  MutexLock lock(mutex_);
  auto it = calls_.find(id);
  if (it == calls_.end()) return std::nullopt;
  return remove(it);
}

std::optional<PendingCall> CallTable::take(std::uint64_t id, std::uint32_t peer) {
  MutexLock lock(mutex_);
  auto it = calls_.find(id);
  if (it == calls_.end() || it->second.call.peer != peer) return std::nullopt;
  return remove(it);
}

CallTable::Calls CallTable::take_expired(TimePoint now) {
  Calls expired;
  MutexLock lock(mutex_);
  while (!deadlines_.empty() && deadlines_.begin()->first.passed(now)) {
    expired.push_back(remove(calls_.find(deadlines_.begin()->second)));
  }
  return expired;
}

template <class Predicate>
CallTable::Calls CallTable::take_if(Predicate predicate) {
  Calls taken;
  MutexLock lock(mutex_);
  for (auto it = calls_.begin(); it != calls_.end();) {
    const auto next = std::next(it);
    if (predicate(it->second.call)) taken.push_back(remove(it));
    it = next;
  }
  // In the order they were made, so that simulated runs repeat.
  std::sort(taken.begin(), taken.end(),
            [](const auto& a, const auto& b) { return a.info.call < b.info.call; });
  return taken;
}

CallTable::Calls CallTable::take_channel(const net::Channel* channel) {
  return take_if([&](const PendingCall& call) { return call.channel == channel; });
}
std::vector<CallTable::Unsent> CallTable::unsent_on(const net::Channel* channel) const {
  std::vector<Unsent> unsent;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, entry] : calls_) {
      if (entry.call.channel == channel && entry.call.unsent)
        unsent.push_back({id, entry.call.peer, entry.call.started, entry.call.unsent});
    }
  }
  std::ranges::sort(unsent, {}, &Unsent::id);
  return unsent;
}

void CallTable::set_unsent(std::uint64_t id, std::shared_ptr<UnsentCall> message) {
  MutexLock lock(mutex_);
  const auto it = calls_.find(id);
  if (it != calls_.end()) it->second.call.unsent = std::move(message);
}

bool CallTable::move_to(std::uint64_t id, const net::Channel* channel) {
  MutexLock lock(mutex_);
  const auto it = calls_.find(id);
  if (it != calls_.end()) it->second.call.channel = channel;
  return it != calls_.end();
}

CallTable::Calls CallTable::take_peer(std::uint32_t peer) {
  return take_if([&](const PendingCall& call) { return call.peer == peer; });
}
CallTable::Calls CallTable::take_peer_older(std::uint32_t peer, TimePoint start) {
  return take_if([&](const PendingCall& call) { return call.peer == peer && call.started < start; });
}
CallTable::Calls CallTable::take_all() {
  return take_if([](const PendingCall&) { return true; });
}

Deadline CallTable::next_deadline() const {
  MutexLock lock(mutex_);
  return deadlines_.empty() ? Deadline::never() : deadlines_.begin()->first;
}

std::size_t CallTable::size() const {
  MutexLock lock(mutex_);
  return calls_.size();
}

std::vector<std::uint32_t> CallTable::peers() const {
  std::vector<std::uint32_t> peers;
  MutexLock lock(mutex_);
  for (const auto& [peer, count] : per_peer_) peers.push_back(peer);
  std::sort(peers.begin(), peers.end());
  return peers;
}

std::vector<DebugInfo::Pending> CallTable::describe(TimePoint now, const PeerTable& peers) const {
  std::map<std::uint64_t, DebugInfo::Pending> by_id;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, entry] : calls_) {
      const PendingCall& call = entry.call;
      by_id[id] = {call.name, peers.name(call.peer), call.user_values ? site_text(call.site) : "",
                   now - call.started, call.deadline.left(now)};
    }
  }
  std::vector<DebugInfo::Pending> rows;
  for (auto& [id, row] : by_id) rows.push_back(std::move(row));
  return rows;
}

}  // namespace torchspan::rpc
