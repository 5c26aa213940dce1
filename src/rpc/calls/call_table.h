#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/source_location.h>
#include <torchspan/detail/device/streams.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rpc/message.h>
#include <torchspan/rpc/debug.h>

#include "rpc/peers/peer_table.h"

namespace torchspan::rpc {

/// Runs on the thread that stops a call's token.
using StopHook = std::stop_callback<std::function<void()>>;

struct IncomingCall;
struct UnsentCall;

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
  bool shown = false;                   ///< in traces, and in the report of a time-out
  std::weak_ptr<IncomingCall> handler;  ///< the served request whose handler made it
  device::Streams streams;              ///< the caller's, without default streams
  std::array<std::unique_ptr<StopHook>, 2> stop_hooks;
  std::shared_ptr<UnsentCall> unsent;  ///< its message, if that is queued on a channel that was not open
};

/// Holds the requests of one worker that wait for replies. The code that completes a request takes it out,
/// exactly once. Thread-safe.
class CallTable {
 public:
  using Calls = std::vector<PendingCall>;
  /// Limits how many user calls wait per peer.
  explicit CallTable(std::size_t most_per_peer) : most_per_peer_(most_per_peer) {}

  std::uint64_t next_id() { return counter_.fetch_add(1, std::memory_order_relaxed) + 1; }
  /// Adds a call. Returns true if its deadline is now the earliest of all. Throws Error{kOverloaded} if too
  /// many user calls wait for that peer; the caller then still has the call.
  bool add(std::uint64_t id, PendingCall& call);
  /// Stores the hook with its call. Returns false if the call has ended; the caller then still has the hook.
  bool attach(std::uint64_t id, std::unique_ptr<StopHook>& hook);
  std::optional<PendingCall> take(std::uint64_t id);
  /// Takes the call only if it was made to that peer.
  std::optional<PendingCall> take(std::uint64_t id, std::uint32_t peer);
  Calls take_expired(TimePoint now);
  Calls take_channel(const net::Channel* channel);
  /// A call that is still in the table, and whose message is queued on a channel that was not open.
  struct Unsent {
    std::uint64_t id;
    std::uint32_t peer;
    TimePoint started;
    std::shared_ptr<UnsentCall> message;
  };
  /// Returns those on the channel, in the order in which they were made.
  std::vector<Unsent> unsent_on(const net::Channel* channel) const;
  /// Does nothing if the call has ended.
  void set_unsent(std::uint64_t id, std::shared_ptr<UnsentCall> message);
  /// The call's message is sent on this channel from now on. Returns false if the call has ended.
  bool move_to(std::uint64_t id, const net::Channel* channel);
  Calls take_peer(std::uint32_t peer);
  /// Takes the peer's calls that started before `start`.
  Calls take_peer_older(std::uint32_t peer, TimePoint start);
  Calls take_all();
  Deadline next_deadline() const;
  std::size_t size() const;
  /// Returns the peers for whose replies calls wait.
  std::vector<std::uint32_t> peers() const;
  /// Describes the calls, oldest first.
  std::vector<DebugInfo::Pending> describe(TimePoint now, const PeerTable& peers) const;

 private:
  using Deadlines = std::multimap<Deadline, std::uint64_t>;
  struct Entry {
    PendingCall call;
    Deadlines::iterator deadline;  ///< deadlines_.end(): none
  };
  using Entries = std::unordered_map<std::uint64_t, Entry>;
  template <class Predicate>
  Calls take_if(Predicate predicate);
  PendingCall remove(Entries::iterator it) TORCHSPAN_REQUIRES(mutex_);

  const std::size_t most_per_peer_;
  std::atomic<std::uint64_t> counter_{0};
  mutable Mutex mutex_;
  Entries calls_ TORCHSPAN_GUARDED_BY(mutex_);
  struct PerPeer {
    std::size_t calls = 0;
    std::size_t user_calls = 0;
  };
  std::unordered_map<std::uint32_t, PerPeer> per_peer_ TORCHSPAN_GUARDED_BY(mutex_);
  Deadlines deadlines_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rpc
