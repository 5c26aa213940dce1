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
#include "wire/api/tensors.h"

namespace torchspan::rpc {

/// A message, and which of its segments are in device memory.
struct ReceivedMessage : net::Message {
  std::vector<wire::DeviceSegment> on_device = {};
};

/// A request that this worker serves, from its frame to its reply.
struct IncomingCall {
  std::uint32_t peer = 0;
  std::uint32_t incarnation = 0;          ///< the peer's
  std::shared_ptr<net::Channel> channel;  ///< null: a request of this worker to itself
  ReceivedMessage message;
  wire::FrameView frame;  ///< views into message.header
  CallInfo info;
  std::string name;
  Deadline deadline;
  TimePoint arrived;
  PeerId from() const { return {peer, incarnation}; }
  wire::Payload payload;
  wire::Handle creation;  ///< kCreateRemote: the new reference
  /// Parts of its handler's environment.
  struct Inherited {
    std::vector<EnvironmentValuePtr> values;           ///< added by interceptors
    std::shared_ptr<const device::Autocast> autocast;  ///< the caller's; null: disabled
  } inherited;
  bool user_values = false;
  std::uint64_t bytes = 0;  ///< memory that it holds while it waits

  /// Stops its handler: the call was cancelled, its deadline passed, or the caller is gone. Runs the token's
  /// callbacks on this thread.
  void request_stop();
  bool stop_requested() const { return stopped_.load(std::memory_order_acquire); }
  /// Returns the token that the handler and its calls watch. Sets `fresh` to whether this is the first time.
  std::stop_token stop_token(bool* fresh = nullptr);

  /// Marks that the handler returned, or that the call was answered. Returns true the second time: the
  /// references among the arguments are then not needed, even if the call is still held.
  bool is_second_of_reply_and_return() { return half_ended_.exchange(true); }

  /// The thread that reads requests, while it runs the handler, which must not wait there.
  std::atomic<ThreadId> inline_thread{};
  std::optional<Timers::Id> stop_timer;  ///< guarded by the ServingTable

 private:
  Mutex mutex_;
  std::atomic<bool> stopped_{false};
  std::atomic<bool> half_ended_{false};
  std::optional<std::stop_source> source_ TORCHSPAN_GUARDED_BY(mutex_);
};
using IncomingPtr = std::shared_ptr<IncomingCall>;

/// Holds the requests that this worker received and has not answered. Thread-safe.
class ServingTable {
 public:
  /// Limits the bytes per peer that wait for a thread; one request may always wait.
  explicit ServingTable(std::uint64_t most_waiting_bytes) : most_waiting_bytes_(most_waiting_bytes) {}

  /// Adds a request. Throws Error{kOverloaded} if too many bytes of its peer wait.
  void add(const IncomingPtr& call);
  /// Sets the name of what a request calls, once it is known.
  void name(IncomingCall& call, std::string name);
  /// Stores the timer that stops the handler. Returns false if the call is answered already.
  bool set_stop_timer(IncomingCall& call, const Timers::Id& timer);
  /// Marks that a thread serves the request.
  void begin(const IncomingCall& call);
  /// Removes a request that is being answered. Returns the timer to cancel, if it has one.
  std::optional<Timers::Id> remove(const IncomingCall& call);
  IncomingPtr find(const net::Channel* channel, std::uint64_t call) const;
  std::vector<IncomingPtr> of_channel(const net::Channel* channel) const;
  std::vector<IncomingPtr> all() const;
  std::vector<DebugInfo::Serving> describe(TimePoint now, const PeerTable& peers) const;
  /// Describes each request, oldest first, as in "runs 'f' of worker 'worker0' for 12.0 s, which its caller
  /// abandoned".
  std::vector<std::string> unfinished(TimePoint now, const PeerTable& peers) const;
  /// Whether a caller still waits for one of the requests.
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
