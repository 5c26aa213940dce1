#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rpc/extension.h>
#include <torchspan/rpc/debug.h>

#include "rpc/agent/timers.h"
#include "rpc/peers/peer_table.h"
#include "rpc/references/presence.h"

namespace torchspan::rpc {

/// A request that came in, from its frame to its reply.
struct IncomingCall {
  std::uint32_t peer = 0;
  std::uint32_t incarnation = 0;          ///< the peer's
  std::shared_ptr<net::Channel> channel;  ///< null: this worker's own
  net::Message message;
  wire::FrameView frame;  ///< views into message.header
  CallInfo info;
  std::string name;
  Deadline deadline;
  TimePoint arrived;
  PeerId from() const { return {peer, incarnation}; }
  wire::Payload payload;
  wire::Handle creation;                    ///< kCreateRemote: the new reference
  std::vector<EnvironmentValuePtr> values;  ///< what interceptors gave its handler's environment
  bool user_values = false;
  std::uint64_t bytes = 0;  ///< what it holds while it waits

  /// Its handler is to stop: somebody cancelled, the deadline passed, or the caller is gone. Runs what waits
  /// for that on this thread.
  void request_stop();
  bool stop_requested() const { return stopped_.load(std::memory_order_acquire); }
  /// What the handler and the calls it makes watch. `fresh` tells whether this is the first time.
  std::stop_token stop_token(bool* fresh = nullptr);

  /// Its handler was left, and it was answered: true for what happens last. Then nobody needs the references
  /// among its arguments, whoever may still hold the call.
  bool end_one_of_both() { return half_ended_.exchange(true); }

  /// The thread that reads requests, while it runs the handler: the handler must not wait there.
  std::atomic<ThreadId> inline_thread{};
  std::optional<Timers::Id> stop_timer;  ///< guarded by the ServingTable

 private:
  Mutex mutex_;
  std::atomic<bool> stopped_{false};
  std::atomic<bool> half_ended_{false};
  std::optional<std::stop_source> source_ TORCHSPAN_GUARDED_BY(mutex_);
};
using IncomingPtr = std::shared_ptr<IncomingCall>;

/// The requests that this worker has taken in and not answered. Thread-safe.
class ServingTable {
 public:
  /// At most this many bytes per peer wait for a thread, but one request always may.
  explicit ServingTable(std::uint64_t most_waiting_bytes) : most_waiting_bytes_(most_waiting_bytes) {}

  /// Throws Error{kOverloaded} when its peer has too much waiting.
  void add(const IncomingPtr& call);
  /// Now it is known what it calls.
  void name(IncomingCall& call, std::string name);
  /// When to tell its handler to stop; false when it is answered already.
  bool set_stop_timer(IncomingCall& call, const Timers::Id& timer);
  /// A thread took it up.
  void begin(const IncomingCall& call);
  /// It is being answered. Gives the timer to cancel, if it has one.
  std::optional<Timers::Id> remove(const IncomingCall& call);
  IncomingPtr find(const net::Channel* channel, std::uint64_t call) const;
  std::vector<IncomingPtr> of_channel(const net::Channel* channel) const;
  std::vector<IncomingPtr> all() const;
  std::vector<DebugInfo::Serving> describe(TimePoint now, const PeerTable& peers) const;
  /// "runs 'f' of worker 'worker0' for 12.0 s, whose caller gave it up", oldest first.
  std::vector<std::string> unfinished(TimePoint now, const PeerTable& peers) const;
  /// Whether a caller still waits for one of them.
  bool awaited(TimePoint now) const;

 private:
  struct Key {
    const net::Channel* channel;
    std::uint64_t call;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.channel) ^ (key.call * 0x9e3779b97f4a7c15u);
    }
  };
  struct Entry {
    IncomingPtr call;
    bool begun = false;
  };
  static Key key_of(const IncomingCall& call) { return {call.channel.get(), call.info.call}; }
  void forget_waiting(Entry& entry) TORCHSPAN_REQUIRES(mutex_);

  const std::uint64_t most_waiting_bytes_;
  mutable Mutex mutex_;
  std::unordered_map<Key, Entry, Hash> calls_ TORCHSPAN_GUARDED_BY(mutex_);
  std::unordered_map<std::uint32_t, std::uint64_t> waiting_bytes_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rpc
