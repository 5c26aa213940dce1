#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include <torchspan/detail/rendezvous/membership.h>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/message_sender.h"
#include "rpc/agent/transport_loop.h"

namespace torchspan::rpc {

class StoppedPeers;

/// How long the calls of a broken connection wait for the report that the peer died, which gives the reason.
inline constexpr Duration kDeathReportTime = std::chrono::milliseconds(500);

/// Sends requests and completes each call once: by its reply, or by what ends it earlier. Thread-safe.
class RequestSender {
 public:
  RequestSender(AgentState& state, TransportLoop& loop, MessageSender& sender, StoppedPeers& stopped_peers)
      : state_(state), loop_(loop), sender_(sender), stopped_peers_(stopped_peers) {}

  void send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion);
  /// Creates a value on a worker, this one included, and returns the reference to it.
  ReferencePtr create(std::uint32_t to, Request request, const std::string& type_name);
  void fail_expired();
  void fail(CallTable::Calls calls, const Error& reason);
  /// Waits for kDeathReportTime, then fails the calls that still wait on the channel.
  void fail_channel_later(const std::shared_ptr<net::Channel>& channel, const Error& reason);
  /// If calls wait on this channel, which has ended before it opened: returns true and connects to the peer again, until
  /// their deadlines, while the peer is a member. `then` runs after their messages were sent once more.
  bool redial(const std::shared_ptr<net::Channel>& channel, const Error& reason, std::function<void()> then);
  /// Returns `error` with the call's name, call site, peer and elapsed time.
  std::exception_ptr annotate(const PendingCall& call, const std::exception_ptr& error) const;

 private:
  void do_send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion,
               const wire::Handle* creation);
  void check_may_start(const Request& request, TimePoint now) const;
  void check_feature(const Request& request, std::uint32_t to) const;
  /// Builds the frame of a request to `peer`.
  OutgoingMessage prepare(const CallInfo& info, const PeerChannels::Link& link, Request& request,
                          const wire::Handle* creation);
  /// Sends the request, or keeps it in the table until its tensors have been copied from their devices.
  void start_or_copy(std::uint64_t id, PendingCall& call, OutgoingMessage out, PeerChannels::Link link,
                     std::optional<wire::Handle> creation);
  /// start(), or undoes what preparing the message did and throws.
  void start_or_undo(std::uint64_t id, PendingCall& call, OutgoingMessage& out, PeerChannels::Link link,
                     bool creates);
  void undo(OutgoingMessage& out, bool creates, const CallInfo& info);
  /// Fails a call that could not be sent.
  void fail_unsent(std::uint64_t id, PendingCall& call, const std::optional<wire::Handle>& creation);
  /// Adds the call to the table and sends its frame on `link`, or on a new link if that one is broken.
  /// Returns false if the call has ended meanwhile. If it throws, the call is still the caller's to complete.
  bool start(std::uint64_t id, PendingCall& call, const OutgoingMessage& out, PeerChannels::Link link);
  /// Cancels the call when one of the tokens is stopped.
  void watch_stop(std::uint64_t id, const std::array<std::stop_token, 2>& tokens);
  void cancel(std::uint64_t id);
  /// Reports the timeout of a call to the launcher, and the handler that made the call, which may end because of it.
  /// Call it before any call that timed out at the same moment fails.
  void report_expired(const PendingCall& call) const;
  void fail_expired(const PendingCall& call) const;
  void resend(const CallTable::Unsent& unsent, const Error& reason);
  bool await_death_report(std::uint64_t id, PendingCall& call, const std::exception_ptr& error);

  AgentState& state_;
  TransportLoop& loop_;
  MessageSender& sender_;
  StoppedPeers& stopped_peers_;
};

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
