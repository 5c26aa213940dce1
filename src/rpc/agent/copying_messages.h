#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/outgoing_message.h"
#include "rpc/agent/transport_loop.h"

namespace torchspan::rpc {

/// Messages whose tensors are still being copied from devices, or sent in parts. Thread-safe.
class CopyingMessages {
 public:
  /// `bytes_sent` counts the bytes of parts.
  CopyingMessages(AgentState& state, TransportLoop& loop, Counter& bytes_sent);

  /// Waits, at most for some microseconds, until the message may be sent. Returns whether it may: small tensors of a
  /// device that is idle are copied sooner than a thread of the pool would wake up.
  bool soon_ready(OutgoingMessage& out) const;
  /// Calls `next` with the message when it may be sent: on the pool, or on a thread that polls. Sends parts of large
  /// tensors to `channel` meanwhile; a failure, or a deadline that passed, is in OutgoingMessage::failure then.
  void add(OutgoingMessage out, std::shared_ptr<net::Channel> channel, Deadline deadline,
           UniqueFunction<void(OutgoingMessage&)> next);
  /// Passes on the oldest messages if they may be sent now; the pool sends parts and large ones. Threads that poll call
  /// it often.
  void look();
  /// Drops all messages, also later ones; after the loop has stopped.
  void drop();

 private:
  struct Copying {
    OutgoingMessage out;
    std::shared_ptr<net::Channel> channel;
    Deadline deadline;
    UniqueFunction<void(OutgoingMessage&)> next;
    std::uint64_t number = 0;             ///< in the order of add()
    std::atomic<bool> busy = false;       ///< a thread asks the devices, sends parts, or has taken it
    std::atomic<std::uint64_t> turn = 0;  ///< of the timer that counts
  };
  using CopyingPtr = std::shared_ptr<Copying>;
  enum class Answer : std::uint8_t { kWaits, kBusy, kCopied };
  /// Asks the devices. One thread gets kCopied, and must pass the message on or post it.
  Answer ask(const CopyingPtr& copying);
  void look_after(const CopyingPtr& copying, Duration pause);
  void send_parts(const CopyingPtr& copying);
  void post(const CopyingPtr& copying);
  void pass_on(const CopyingPtr& copying);

  AgentState& state_;
  TransportLoop& loop_;
  Counter& bytes_sent_;
  Counter& split_;  ///< tensors that were sent in parts
  Mutex mutex_;
  std::map<std::uint64_t, CopyingPtr> messages_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t last_number_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  bool drops_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::atomic<std::size_t> count_{0};  ///< of `messages_`
  std::atomic<bool> looking_{false};   ///< one thread at a time
};

}  // namespace torchspan::rpc
