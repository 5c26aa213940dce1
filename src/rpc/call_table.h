#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torchspan/core/mutex.h>
#include <torchspan/core/source_location.h>
#include <torchspan/net/transport.h>
#include <torchspan/rpc/message.h>

namespace torchspan::rpc {

/// A request that waits for its reply.
struct PendingCall {
  std::shared_ptr<Completion> completion;
  CallInfo info;
  std::string name;
  std::uint32_t peer = 0;
  const net::Channel* channel = nullptr;  ///< identity only
  Deadline deadline;
  TimePoint started;
  SourceLocation site;
  bool user_values = false;
};

/// The requests of one worker that wait for replies. Each is taken out exactly once, by whoever completes it.
/// Thread-safe.
class CallTable {
 public:
  using Calls = std::vector<PendingCall>;

  std::uint64_t next_id();
  /// True when its deadline is now the earliest of all.
  bool add(std::uint64_t id, PendingCall call);
  std::optional<PendingCall> take(std::uint64_t id);
  Calls take_expired(TimePoint now);
  Calls take_channel(const net::Channel* channel);
  Calls take_peer(std::uint32_t peer);
  Calls take_all();
  Deadline next_deadline() const;
  std::size_t size() const;

 private:
  template <class Predicate>
  Calls take_if(Predicate predicate);

  mutable Mutex mutex_;
  std::uint64_t counter_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::unordered_map<std::uint64_t, PendingCall> calls_ TORCHSPAN_GUARDED_BY(mutex_);
  std::multimap<Deadline, std::uint64_t> deadlines_
      TORCHSPAN_GUARDED_BY(mutex_);  ///< may name calls long gone
};

}  // namespace torchspan::rpc
