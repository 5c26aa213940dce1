#include "rpc/calls/serving.h"

#include <algorithm>
#include <fmt/format.h>

#include "core/api/throw_invalid.h"

namespace torchspan::rpc {

void IncomingCall::request_stop() {
  std::optional<std::stop_source> source;
  {
    MutexLock lock(mutex_);
    stopped_.store(true, std::memory_order_release);
    source = source_;
  }
  if (source) source->request_stop();
}

std::stop_token IncomingCall::stop_token(bool* fresh) {
  MutexLock lock(mutex_);
  if (fresh != nullptr) *fresh = !source_;
  if (!source_) {
    source_.emplace();
    if (stop_requested()) source_->request_stop();  // no callback is registered yet
  }
  return source_->get_token();
}

void ServingTable::add(const IncomingPtr& call) {
  MutexLock lock(mutex_);
  if (calls_.contains(key_of(*call)))
    throw_invalid("call number {} of this caller is being served already", call->info.call);
  std::uint64_t& waiting = waiting_bytes_[call->peer];
  if (waiting != 0 && waiting + call->bytes > most_waiting_bytes_) {
    throw Error(
        ErrorKind::kOverloaded,
        fmt::format("{} bytes of this caller's requests wait for a thread already, and {} more are over "
                    "the limit WorkerOptions::max_waiting_bytes ({}); wait for replies before you "
                    "call again",
                    waiting, call->bytes, most_waiting_bytes_));
  }
  waiting += call->bytes;
  calls_[key_of(*call)] = {call, false};
}

void ServingTable::forget_waiting(Entry& entry) {
  if (entry.begun) return;
  entry.begun = true;
  auto waiting = waiting_bytes_.find(entry.call->peer);
  waiting->second -= entry.call->bytes;
  if (waiting->second == 0) waiting_bytes_.erase(waiting);
}

void ServingTable::name(IncomingCall& call, std::string name) {
  MutexLock lock(mutex_);
  call.name = std::move(name);
  call.info.name = call.name;
}

bool ServingTable::set_stop_timer(IncomingCall& call, const Timers::Id& timer) {
  MutexLock lock(mutex_);
  auto found = calls_.find(key_of(call));
  if (found == calls_.end() || found->second.call.get() != &call) return false;
  call.stop_timer = timer;
  return true;
}

void ServingTable::begin(const IncomingCall& call) {
  MutexLock lock(mutex_);
  if (auto found = calls_.find(key_of(call)); found != calls_.end()) forget_waiting(found->second);
}

std::optional<Timers::Id> ServingTable::remove(const IncomingCall& call) {
  MutexLock lock(mutex_);
  auto found = calls_.find(key_of(call));
  if (found == calls_.end() || found->second.call.get() != &call) return std::nullopt;
  forget_waiting(found->second);
  calls_.erase(found);
  return call.stop_timer;
}

IncomingPtr ServingTable::find(const net::Channel* channel, std::uint64_t call) const {
  MutexLock lock(mutex_);
  auto found = calls_.find({channel, call});
  return found == calls_.end() ? nullptr : found->second.call;
}

std::vector<IncomingPtr> ServingTable::of_channel(const net::Channel* channel) const {
  std::vector<IncomingPtr> calls = all();
  std::erase_if(calls, [&](const IncomingPtr& call) { return call->channel.get() != channel; });
  return calls;
}

std::vector<IncomingPtr> ServingTable::all() const {
  std::vector<IncomingPtr> calls;
  {
    MutexLock lock(mutex_);
    calls.reserve(calls_.size());
    for (const auto& [key, entry] : calls_) calls.push_back(entry.call);
  }
  // In the order of their arrival, so that simulated runs repeat.
  std::sort(calls.begin(), calls.end(), [](const IncomingPtr& a, const IncomingPtr& b) {
    return std::tie(a->arrived, a->peer, a->info.call) < std::tie(b->arrived, b->peer, b->info.call);
  });
  return calls;
}

std::vector<DebugInfo::Serving> ServingTable::describe(TimePoint now, const PeerTable& peers) const {
  std::vector<DebugInfo::Serving> rows;
  for (const IncomingPtr& call : all()) {
    MutexLock lock(mutex_);
    auto found = calls_.find(key_of(*call));
    if (found == calls_.end()) continue;
    rows.push_back({call->name, peers.name(call->peer), now - call->arrived, found->second.begun});
  }
  return rows;
}

std::vector<std::string> ServingTable::unfinished(TimePoint now, const PeerTable& peers) const {
  std::vector<std::string> lines;
  for (const IncomingPtr& call : all()) {
    MutexLock lock(mutex_);
    auto found = calls_.find(key_of(*call));
    if (found == calls_.end()) continue;
    std::string line =
        fmt::format("{} '{}' of worker '{}' for {:.1f} s", found->second.begun ? "runs" : "keeps", call->name,
                    peers.name(call->peer), to_seconds(now - call->arrived));
    if (call->deadline.passed(now)) {
      line += fmt::format(", whose deadline passed {:.1f} s ago", to_seconds(now - call->deadline.at()));
    } else if (call->stop_requested()) {
      line += ", which its caller abandoned";
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

bool ServingTable::awaited(TimePoint now) const {
  const std::vector<IncomingPtr> calls = all();
  return std::any_of(calls.begin(), calls.end(), [&](const IncomingPtr& call) {
    return !call->deadline.passed(now) && !call->stop_requested();
  });
}

}  // namespace torchspan::rpc
