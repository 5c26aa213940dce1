#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <vector>

#include <torchspan/core/time.h>
#include <torchspan/detail/rpc/extension.h>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/message_sender.h"
#include "rpc/agent/transport_loop.h"

namespace torchspan::rpc {

/// Decides which functions declared kInline still run on the receiving thread: a function that takes long
/// moves to the pool. Its user guards it: is_short() and move_to_pool() by the driver lock; only one thread
/// calls ran().
class InlinePolicy {
 public:
  bool is_short(std::uint64_t function) const { return !long_functions_.contains(function); }
  /// Counts a run. Returns true if the function has now run too long too often.
  bool ran(std::uint64_t function, Duration took);
  /// Moves the function to the pool. Returns false if it has moved before.
  bool move_to_pool(std::uint64_t function) { return long_functions_.insert(function).second; }

 private:
  std::map<std::uint64_t, int> long_runs_;
  std::set<std::uint64_t> long_functions_;
};

/// Serves one type of message.
struct RequestHandler {
  using Serve = std::function<void(const IncomingPtr&, const std::shared_ptr<Completion>&)>;
  std::string name;
  RunOn where = RunOn::kPool;
  bool user_values = false;
  Serve serve;
};

/// Serves requests: unpacks them, waits for the references among their arguments, runs their handlers, and
/// tracks them until they are answered. Thread-safe once all handlers are added.
class RequestServer final {
 public:
  RequestServer(AgentState& state, TransportLoop& loop, MessageSender& sender);

  /// Adds a handler, before the first message. Throws Error{kInvalid} if the type has one already.
  void add_handler(wire::MessageType type, RequestHandler handler);
  /// Receives a request whose frame is decoded, on the thread that polls.
  void receive(IncomingPtr call);
  /// Returns the token that stops a call being served. The call's deadline stops it, too.
  std::stop_token stop_token_of(const IncomingPtr& served);
  /// Removes a call that was answered.
  void answered(IncomingCall& call);
  /// Counts a creation that is answered with an error as arrived, whether it began or not: calls that wait
  /// for its value get the error. Returns the error to answer with.
  std::exception_ptr count_failed_creation(const IncomingCall& call, const std::exception_ptr& cause);

  /// Runs an inline call on the loop's thread, after the poll that received it.
  void run_here(const InlineCall& call);
  /// Posts it to the pool, for a caller that polled while it waits: its thread must not run the call.
  void run_on_pool(const InlineCall& call);

 private:
  std::shared_ptr<Completion> make_completion(const IncomingPtr& call);
  bool is_inline(const IncomingCall& call) const;
  void post(const IncomingPtr& call, const RequestHandler& handler);
  void refuse(const IncomingPtr& call, std::exception_ptr error);
  void take_handles(IncomingCall& call);
  void unpack(IncomingCall& call);
  /// Waits, without holding a thread, until the references among the arguments are confirmed; then serves.
  void run(const IncomingPtr& call, const RequestHandler& handler);
  void serve(const IncomingPtr& call, const RequestHandler& handler, const std::shared_ptr<Completion>& reply,
             const std::vector<Future<void>>& references);
  /// Ends the use of the call by the thread that called the handler.
  void leave_call(IncomingCall& call, const RequestHandler& handler);

  AgentState& state_;
  TransportLoop& loop_;
  MessageSender& sender_;
  InlinePolicy inline_policy_;
  std::unordered_map<std::uint16_t, RequestHandler> handlers_;
};

}  // namespace torchspan::rpc
