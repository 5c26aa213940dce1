#include "rpc/call_table.h"

#include <algorithm>

namespace torchspan::rpc {

std::uint64_t CallTable::next_id() {
  MutexLock lock(mutex_);
  return ++counter_;
}

bool CallTable::add(std::uint64_t id, PendingCall call) {
  MutexLock lock(mutex_);
  const Deadline deadline = call.deadline;
  calls_.emplace(id, std::move(call));
  if (deadline.is_never()) return false;
  return deadlines_.emplace(deadline, id) == deadlines_.begin();
}

std::optional<PendingCall> CallTable::take(std::uint64_t id) {
  MutexLock lock(mutex_);
  auto it = calls_.find(id);
  if (it == calls_.end()) return std::nullopt;
  PendingCall call = std::move(it->second);
  calls_.erase(it);
  while (!deadlines_.empty() && !calls_.contains(deadlines_.begin()->second))
    deadlines_.erase(deadlines_.begin());
  return call;
}

CallTable::Calls CallTable::take_expired(TimePoint now) {
  Calls expired;
  MutexLock lock(mutex_);
  while (!deadlines_.empty() && deadlines_.begin()->first.passed(now)) {
    auto it = calls_.find(deadlines_.begin()->second);
    deadlines_.erase(deadlines_.begin());
    if (it == calls_.end()) continue;
    expired.push_back(std::move(it->second));
    calls_.erase(it);
  }
  return expired;
}

template <class Predicate>
CallTable::Calls CallTable::take_if(Predicate predicate) {
  Calls taken;
  MutexLock lock(mutex_);
  for (auto it = calls_.begin(); it != calls_.end();) {
    if (predicate(it->second)) {
      taken.push_back(std::move(it->second));
      it = calls_.erase(it);
    } else {
      ++it;
    }
  }
  // In the order they were made, so that simulated runs repeat.
  std::sort(taken.begin(), taken.end(),
            [](const auto& a, const auto& b) { return a.info.call < b.info.call; });
  return taken;
}

CallTable::Calls CallTable::take_channel(const net::Channel* channel) {
  return take_if([&](const PendingCall& call) { return call.channel == channel; });
}
CallTable::Calls CallTable::take_peer(std::uint32_t peer) {
  return take_if([&](const PendingCall& call) { return call.peer == peer; });
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

}  // namespace torchspan::rpc
