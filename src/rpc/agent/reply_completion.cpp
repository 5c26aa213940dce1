#include "rpc/agent/reply_completion.h"

#include <fmt/format.h>
#include <utility>

#include "rpc/agent/request_server.h"

namespace torchspan::rpc {
namespace {

/// Adds what the caller gets besides the Error.
void add_failure_blobs(wire::Frame& frame, const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const UserFailure& failure) {
    if (failure.encoded()) frame.blobs.push_back({kErrorBlob, *failure.encoded()});
    if (failure.refusal())
      frame.blobs.push_back({kRefusalBlob, {static_cast<std::byte>(*failure.refusal())}});
  } catch (...) {
  }
}

}  // namespace

ReplyCompletion::~ReplyCompletion() {
  if (!state_.runtime.executor.process().is_current()) return;
  if (!sent_.load()) {
    fail(std::make_exception_ptr(Error(ErrorKind::kCancelled, "the handler was dropped before it replied")));
  }
}

void ReplyCompletion::succeed(wire::Payload& reply) {
  state_.runtime.executor.process().end_child(state_.self.name);
  if (sent_.exchange(true)) return;
  CallInfo info = call_->info;
  info.reply = true;
  try {
    OutgoingMessage out = [&] {
      const EnvironmentScope serving(Environment::of_call(call_));
      return sender_.prepare(info, call_->from(), reply,
                             {.user_values = call_->user_values, .channel = call_->channel.get()});
    }();
    out.frame.header.type = info.type;
    out.frame.header.flags |= wire::kFlagReply;
    if (out.ready() || sender_.copying().soon_ready(out)) return send(info, out);
    sender_.copying().add(
        std::move(out), call_->channel, call_->deadline,
        [self = shared_from_this(), info](OutgoingMessage& copied) { self->try_to_send(info, copied); });
  } catch (...) {
    sent_.store(false);
    fail(std::current_exception());
  }
}

void ReplyCompletion::try_to_send(const CallInfo& info, OutgoingMessage& out) {
  try {
    send(info, out);
  } catch (...) {
    sent_.store(false);
    fail(std::current_exception());
  }
}

void ReplyCompletion::send(const CallInfo& info, OutgoingMessage& out) {
  try {
    sender_.send(call_->channel, out);
  } catch (const std::exception&) {
    const Error error = to_error(std::current_exception());
    const bool small = out.tensors.segments.empty() && out.split.empty();
    if (error.kind() == ErrorKind::kOverloaded && !call_->user_values && small) {
      // The caller reads kOverloaded as a request that was not served, so such a reply waits for room.
      sender_.send_reply({call_->channel, std::move(out.frame), call_->name, call_->deadline});
      return server_.answered(*call_);
    }
    sender_.undo(info, out.frame);
    if (error.kind() != ErrorKind::kDisconnected) throw;
    state_.runtime.log.info(
        fmt::format("the reply to '{}' could not be sent: {}", call_->name, error.what()));
  }
  server_.answered(*call_);
}

void ReplyCompletion::fail(std::exception_ptr cause) {
  state_.runtime.executor.process().end_child(state_.self.name);
  if (sent_.exchange(true)) return;
  cause = server_.count_failed_creation(*call_, cause);
  SmallReply failure{call_->channel, {}, call_->name, call_->deadline};
  wire::Frame& frame = failure.frame;
  frame.header.type = call_->info.type;
  frame.header.flags = wire::kFlagReply | wire::kFlagError;
  frame.header.call = call_->info.call;
  frame.header.instance = state_.instance;
  frame.header.version = call_->frame.header.version;
  frame.value = wire::to_payload(to_error(cause)).value;
  add_failure_blobs(frame, cause);
  sender_.send_reply(std::move(failure));
  server_.answered(*call_);
}

}  // namespace torchspan::rpc
