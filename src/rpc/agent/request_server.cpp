#include "rpc/agent/request_server.h"

#include <atomic>
#include <cstdlib>
#include <cxxabi.h>
#include <fmt/format.h>
#include <memory>
#include <utility>

#include "core/api/throw_invalid.h"
#include "rpc/agent/agent_state.h"
#include "rpc/agent/message_sender.h"
#include "rpc/calls/autocast_header.h"

namespace torchspan::rpc {
namespace {

/// How long a function declared kInline may take, including the time in which other threads have its core.
constexpr Duration kShort = std::chrono::milliseconds(10);
/// What a long run adds to a function's score, while each later short run subtracts one; and the score that
/// moves a function to the pool. Three long runs in a row reach it; an occasional long run, when another
/// thread took the core, does not.
constexpr int kLongRun = 8, kTooLong = 17;

}  // namespace

bool InlinePolicy::ran(std::uint64_t function, Duration took) {
  if (took <= kShort) {
    if (const auto found = long_runs_.find(function); found != long_runs_.end() && --found->second == 0)
      long_runs_.erase(found);
    return false;
  }
  if ((long_runs_[function] += kLongRun) < kTooLong) return false;
  long_runs_.erase(function);
  return true;
}

namespace {

/// Sends the reply of a request, once. Keeps the agent alive.
class ReplyCompletion final : public Completion, public std::enable_shared_from_this<ReplyCompletion> {
 public:
  ReplyCompletion(AgentState& state, MessageSender& sender, RequestServer& server, IncomingPtr call)
      : agent_(state.backend.lock()),
        state_(state),
        sender_(sender),
        server_(server),
        call_(std::move(call)) {}
  /// Fails the call if it was not answered.
  ~ReplyCompletion() override;
  void succeed(wire::Payload& reply) override;
  void fail(std::exception_ptr error) override;

 private:
  void try_to_send(const CallInfo& info, OutgoingMessage& out);
  void send(const CallInfo& info, OutgoingMessage& out);

  const std::shared_ptr<WorkerBackend> agent_;
  AgentState& state_;
  MessageSender& sender_;
  RequestServer& server_;
  IncomingPtr call_;
  std::atomic<bool> sent_{false};
};

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

/// Memory that a waiting request takes besides its bytes.
constexpr std::uint64_t kRequestOverhead = 1024;

std::uint64_t function_of(const IncomingCall& call) {
  return ByteReader(call.frame.value).get<std::uint64_t>();
}

/// Runs `next` when every future is done, whatever their outcomes.
void when_done(const std::vector<Future<void>>& futures, std::function<void()> next) {
  auto left = std::make_shared<std::atomic<std::size_t>>(futures.size());
  for (const Future<void>& future : futures) {
    future.add_done_callback([left, next](Future<void>) {
      if (left->fetch_sub(1) == 1) next();
    });
  }
}

void throw_first_failure(const std::vector<Future<void>>& futures) {
  for (const Future<void>& future : futures) {
    if (future.error()) std::rethrow_exception(future.error());
  }
}

}  // namespace

RequestServer::RequestServer(AgentState& state, TransportLoop& loop, MessageSender& sender)
    : state_(state), loop_(loop), sender_(sender) {}

void RequestServer::add_handler(wire::MessageType type, RequestHandler handler) {
  const std::string name = handler.name;
  auto [it, fresh] = handlers_.emplace(static_cast<std::uint16_t>(type), std::move(handler));
  if (!fresh) {
    throw_invalid("message type {:#06x} is taken by '{}', so '{}' cannot have it", static_cast<int>(type),
                  it->second.name, name);
  }
}

std::shared_ptr<Completion> RequestServer::make_completion(const IncomingPtr& call) {
  return std::make_shared<ReplyCompletion>(state_, sender_, *this, call);
}

void RequestServer::refuse(const IncomingPtr& call, std::exception_ptr error) {
  make_completion(call)->fail(std::move(error));
  state_.references->driver().release_references(std::move(call->payload.references));
}

void RequestServer::receive(IncomingPtr call) {
  state_.running.fetch_add(1);
  const wire::MessageType type = call->frame.header.type;
  call->info = {type, {}, call->peer, call->frame.header.call, false};
  try {
    take_handles(*call);
    auto it = handlers_.find(static_cast<std::uint16_t>(type));
    if (it == handlers_.end()) {
      throw Error(
          ErrorKind::kUnsupported,
          fmt::format("worker '{}' does not serve messages of type {:#06x}: its session lacks the extension "
                      "that does",
                      state_.self.name, static_cast<int>(type)));
    }
    const RequestHandler& handler = it->second;
    call->name = handler.name;
    call->info.name = call->name;
    call->user_values = handler.user_values;
    const bool here = handler.where == RunOn::kReceiver ||
                      (handler.where == RunOn::kDispatcher && !loop_.driven_by_caller());
    if (here && call->channel) return run(call, handler);
    call->bytes = kRequestOverhead + call->message.header.size();
    for (const Buffer& segment : call->message.segments) call->bytes += segment.size;
    if (handler.where == RunOn::kPool) state_.serving.add(call);
    if (is_inline(*call)) return loop_.add_inline({call, &handler});
    post(call, handler);
  } catch (...) {
    refuse(call, std::current_exception());
  }
}

/// Takes the handles at once, in the order of arrival: a later message on this channel may ask about them.
void RequestServer::take_handles(IncomingCall& call) {
  std::vector<wire::Handle> handles = call.frame.handles;
  const wire::MessageType type = call.frame.header.type;
  if (type == kCreateRemote || type == kCreateByOperator || type == kCreateByMethod) {
    if (handles.empty()) throw_invalid("a creation arrived without its reference");
    call.creation = handles.front();
    handles.erase(handles.begin());
  }
  call.payload.references = state_.references->from_handles(handles, call.from());
}

bool RequestServer::is_inline(const IncomingCall& call) const {
  if (call.info.type != kCallFunction || !call.channel || !call.payload.references.empty()) return false;
  if (call.frame.value.size() < sizeof(std::uint64_t)) return false;
  const std::uint64_t id = function_of(call);
  const FunctionEntry* function = state_.functions.find(id);
  return function != nullptr && function->serve == torchspan::Serve::kInline && inline_policy_.is_short(id);
}

void RequestServer::post(const IncomingPtr& call, const RequestHandler& handler) {
  state_.continuations->post([this, alive = state_.backend.lock(), call, &handler] { run(call, handler); });
}

void RequestServer::run_on_pool(const InlineCall& call) { post(call.call, *call.handler); }

void RequestServer::run_here(const InlineCall& inline_call) {
  const IncomingPtr& call = inline_call.call;
  const TimePoint begin = state_.runtime.executor.now();
  call->inline_thread.store(std::this_thread::get_id());
  try {
    run(call, *inline_call.handler);
  } catch (abi::__forced_unwind&) {
    state_.runtime.log.error(fmt::format(
        "function '{}' is declared kInline and ended the thread that reads messages, so this process ends",
        call->name));
    std::abort();
  }
  call->inline_thread.store({});
  const Duration took = state_.runtime.executor.now() - begin;
  const std::uint64_t id = function_of(*call);
  if (!inline_policy_.ran(id, took)) return;
  DriverLockGuard hold(loop_.driver_lock(), state_.runtime.executor);
  if (!inline_policy_.move_to_pool(id)) return;
  state_.runtime.log.warning(fmt::format(
      "function '{}' is declared kInline but took {:.3f} ms; it is served on the pool from now on",
      call->name, to_seconds(took) * 1e3));
}

void RequestServer::unpack(IncomingCall& call) {
  const wire::FrameView& frame = call.frame;
  call.payload.value.assign(frame.value.begin(), frame.value.end());
  call.payload.tensors = wire::unpack(frame.tensor_metadata, call.message.segments,
                                      {.copies = &state_.copies, .on_device = call.message.on_device});
  if (!call.user_values) return;
  call.info.no_grad = frame.blob(kNoGradBlob) != nullptr;
  if (const auto* blob = frame.blob(kAutocastBlob)) {
    device::Autocast autocast = decode_autocast(blob->bytes);
    if (autocast.enabled())
      call.inherited.autocast = std::make_shared<const device::Autocast>(std::move(autocast));
  }
  for (Interceptor* interceptor : state_.interceptors) {
    const auto* blob = frame.blob(interceptor->name());
    auto value =
        interceptor->incoming(call.info, call.payload.tensors, blob == nullptr ? BytesView() : blob->bytes);
    if (value) call.inherited.values.push_back(std::move(value));
  }
}

/// Runs on a pool thread, or on the posting thread if the pool has none.
void RequestServer::run(const IncomingPtr& call, const RequestHandler& handler) {
  const EnvironmentScope empty{Environment()};
  const std::shared_ptr<Completion> reply = make_completion(call);
  std::vector<Future<void>> references, waits;
  try {
    unpack(*call);
    for (const auto& reference : call->payload.references) {
      if (!reference) continue;
      references.push_back(std::static_pointer_cast<Reference>(reference)->ready());
      if (!references.back().done()) waits.push_back(references.back());
    }
  } catch (...) {
    reply->fail(std::current_exception());
    return leave_call(*call, handler);
  }
  if (waits.empty()) return serve(call, handler, reply, references);
  // The references may never be confirmed: the end of the call also ends the wait.
  auto hook = std::make_shared<std::unique_ptr<StopHook>>();
  *hook = std::make_unique<StopHook>(stop_token_of(call), [reply] {
    reply->fail(std::make_exception_ptr(
        Error(ErrorKind::kTimedOut,
              "a reference among the arguments was not confirmed before the call ended; the "
              "creation of its value may have been lost")));
  });
  when_done(waits, [this, call, &handler, reply, references, hook] {
    hook->reset();
    serve(call, handler, reply, references);
  });
}

void RequestServer::serve(const IncomingPtr& call, const RequestHandler& handler,
                          const std::shared_ptr<Completion>& reply,
                          const std::vector<Future<void>>& references) {
  try {
    if (call->deadline.passed(state_.runtime.executor.now()))
      throw Error(ErrorKind::kTimedOut, "the caller's deadline passed before the work could begin");
    if (call->stop_requested())
      throw Error(ErrorKind::kCancelled, "the caller cancelled the call before the work could begin");
    throw_first_failure(references);
    state_.serving.begin(*call);
    handler.serve(call, reply);
  } catch (abi::__forced_unwind&) {
    leave_call(*call, handler);
    throw;
  } catch (...) {
    reply->fail(std::current_exception());
  }
  leave_call(*call, handler);
}

void RequestServer::leave_call(IncomingCall& call, const RequestHandler& handler) {
  if (!call.is_second_of_reply_and_return()) return;
  auto references = std::move(call.payload.references);
  if (handler.where != RunOn::kPool)
    state_.references->driver().release_references(std::move(references));  // else released here and now
}

void RequestServer::answered(IncomingCall& call) {
  if (auto timer = state_.serving.remove(call)) loop_.cancel(*timer);
  if (call.is_second_of_reply_and_return())
    state_.references->driver().release_references(std::move(call.payload.references));
  state_.handled.fetch_add(1);
  state_.running.fetch_sub(1);
}

std::exception_ptr RequestServer::count_failed_creation(const IncomingCall& call,
                                                        const std::exception_ptr& cause) {
  if (call.creation == wire::Handle{} || call.peer == state_.self.rank) return cause;
  try {
    const auto* site = call.frame.blob(kSiteBlob);
    state_.references->arriving_creation(call.creation, call.from(), site ? site->bytes : BytesView())
        ->set_error(cause);
    return cause;
  } catch (...) {  // the creation was not for this worker
    return std::current_exception();
  }
}

std::stop_token RequestServer::stop_token_of(const IncomingPtr& served) {
  bool fresh = false;
  std::stop_token token = served->stop_token(&fresh);
  if (!fresh || served->deadline.is_never()) return token;
  const Timers::Id timer = loop_.at(served->deadline, [weak = std::weak_ptr<IncomingCall>(served)] {
    if (auto call = weak.lock()) call->request_stop();
  });
  state_.serving.set_stop_timer(*served, timer);
  return token;
}

}  // namespace torchspan::rpc
