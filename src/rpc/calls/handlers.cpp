#include "rpc/calls/handlers.h"

#include <cxxabi.h>
#include <fmt/format.h>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "rpc/agent/agent.h"
#include "rpc/calls/script.h"
#include "rpc/references/control.h"

namespace torchspan::rpc {
namespace {

std::vector<std::shared_ptr<torch::jit::Operator>> overloads_of(const std::string& name) {
  const auto dot = name.find('.');
  const std::string base = name.substr(0, dot);
  if (base.find("::") == std::string::npos) {
    throw_invalid(
        "'{}' is neither a TorchScript function of this worker's table (FunctionTable::add_script) nor an "
        "operator; those are written with their namespace, like aten::add",
        name);
  }
  auto all = torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(base));
  if (dot != std::string::npos) {
    const std::string overload = name.substr(dot + 1);
    std::erase_if(all, [&](const auto& op) { return op->schema().overload_name() != overload; });
  }
  if (all.empty()) throw_invalid("there is no operator '{}' in this LibTorch", name);
  return all;
}

/// Fills `stack` with the schema's arguments. Returns false if they do not fit.
bool match(const c10::FunctionSchema& schema, std::vector<c10::IValue> args,
           const std::unordered_map<std::string, c10::IValue>& kwargs, std::vector<c10::IValue>& stack) {
  try {
    schema.checkAndNormalizeInputs(args, kwargs);
  } catch (const std::exception&) {
    return false;
  }
  stack = std::move(args);
  return true;
}

/// Runs the overload of an ATen operator that accepts the arguments. `name` is "aten::add", or
/// "aten::add.Tensor" for one overload. Returns several results as a tuple, and none as None. Throws
/// Error{kInvalid} with the schemas if the operator is unknown or no overload fits; passes on what the
/// operator throws.
c10::IValue call_operator(const std::string& name, std::vector<c10::IValue> args,
                          const std::map<std::string, c10::IValue>& kwargs) {
  const std::unordered_map<std::string, c10::IValue> named(kwargs.begin(), kwargs.end());
  const auto overloads = overloads_of(name);
  for (const auto& op : overloads) {
    std::vector<c10::IValue> stack;
    if (!match(op->schema(), args, named, stack)) continue;
    op->getOperation()(stack);
    if (stack.empty()) return {};
    if (stack.size() == 1) return std::move(stack.front());
    return c10::ivalue::Tuple::create(std::move(stack));
  }
  std::ostringstream schemas;
  for (const auto& op : overloads) schemas << "\n  " << op->schema();
  std::string given;
  for (const auto& arg : args) given += (given.empty() ? "" : ", ") + arg.tagKind();
  for (const auto& [key, arg] : kwargs)
    given += fmt::format("{}{}={}", given.empty() ? "" : ", ", key, arg.tagKind());
  throw_invalid("no overload of '{}' takes ({}); there are:{}", name, given, schemas.str());
}

/// Longer texts of exceptions appear whole in the frame only.
constexpr std::size_t kMostHeadline = 2048;

/// The kind of an Error with which the function itself refuses the call. What other workers reported to it, and their ends,
/// concern those; its own wrong calls (kInvalid) do not concern the caller.
std::optional<ErrorKind> refusal_in(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const Error& error) {
    const ErrorKind kind = error.kind();
    const bool by_function = error.worker().empty() && error.frames().empty();
    const bool refuses =
        kind == ErrorKind::kOverloaded || kind == ErrorKind::kDenied || kind == ErrorKind::kUnsupported;
    if (by_function && refuses) return kind;
  } catch (...) {
  }
  return std::nullopt;
}

/// The encoded exception of a failed creation, whose failure another function passes on.
std::optional<Bytes> encoded_in(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const UserFailure& failure) {
    return failure.encoded();
  } catch (...) {
  }
  return std::nullopt;
}

/// Makes the error that the caller of a user function gets: the chain so far, and this hop.
std::exception_ptr remote_failure(RpcAgent& agent, const std::string& call, const std::exception_ptr& cause) {
  const ExceptionDescription description = describe(cause);
  std::string text = description.text;
  std::string message =
      fmt::format("'{}' threw {}: {}", call, description.type, shortened(text, kMostHeadline));
  std::vector<RemoteFrame> frames;
  try {
    std::rethrow_exception(cause);
  } catch (const Error& error) {
    frames = error.frames();
    text = error.headline();
    message = fmt::format("'{}' threw {}: {}", call, description.type, shortened(text, kMostHeadline));
    // The text of the exception appears once, where it was thrown.
    if (error.kind() == ErrorKind::kRemoteFailure && !frames.empty()) {
      const RemoteFrame& first = frames.front();
      const RemoteFrame& last = frames.back();
      text = fmt::format("what '{}' on worker '{}' threw", last.call, last.worker);
      message = fmt::format("'{}' threw what '{}' on worker '{}' threw: {}: {}", call, first.call,
                            first.worker, first.type, shortened(first.text, kMostHeadline));
    }
  } catch (const std::nested_exception& rebuilt) {
    if (rebuilt.nested_ptr()) frames = to_error(rebuilt.nested_ptr()).frames();
  } catch (...) {
  }
  std::optional<Bytes> encoded = encoded_in(cause);
  try {
    if (!encoded) encoded = agent.functions().errors().encode(cause);
  } catch (const Error& failure) {  // the caller gets the text of the exception instead
    message += fmt::format(" ({})", failure.message());
    agent.runtime().log.warning(failure.message());
  }
  Error error(ErrorKind::kRemoteFailure, message);
  for (RemoteFrame& frame : frames) error.with_frame(std::move(frame));
  error.with_frame({agent.self().name, call, description.type, text});
  agent.runtime().log.info(error.what());
  const std::optional<ErrorKind> refusal = refusal_in(cause);
  if (!encoded && !refusal) return std::make_exception_ptr(error);
  return std::make_exception_ptr(UserFailure(std::move(error), std::move(encoded), refusal));
}

/// The current exception, thrown while the value of `call` was encoded. An Error says itself what to do.
std::exception_ptr encoding_failure(RpcAgent& agent, const std::string& call) {
  const std::exception_ptr cause = std::current_exception();
  try {
    throw;
  } catch (const Error&) {
    return cause;
  } catch (...) {
    const ExceptionDescription description = describe(cause);
    Error error(ErrorKind::kRemoteFailure,
                fmt::format("the value that '{}' returned could not be encoded: {}: {}", call,
                            description.type, shortened(description.text, kMostHeadline)));
    error.with_frame({agent.self().name, call, description.type, description.text});
    return std::make_exception_ptr(error);
  }
}

/// The failure of a function that called pthread_exit(), which no catch block may stop.
std::exception_ptr thread_ended(RpcAgent& agent, const std::string& function) {
  const Error error(
      ErrorKind::kInvalid,
      fmt::format("function '{}' ended its thread (pthread_exit() was called, or the thread was canceled): "
                  "return or throw instead",
                  function));
  agent.runtime().log.error(error.message());
  return std::make_exception_ptr(error);
}

using Deliver = std::function<void(const ValuePtr&, std::exception_ptr)>;

/// Runs the function whose id leads the payload, and delivers its value or failure, now or later.
void run_entry(const std::shared_ptr<RpcAgent>& agent, const IncomingPtr& call, Deliver deliver) {
  wire::Decoder decoder(call->payload);
  const FunctionEntry* entry = agent->functions().find(wire::decode<std::uint64_t>(decoder));
  if (entry == nullptr) {
    throw_invalid(
        "worker '{}' does not have this function, which worker '{}' called; add the token to its "
        "FunctionTable, or call it only after all workers were updated to a program that has it",
        agent->self().name, agent->name_of(call->peer));
  }
  agent->serving().name(*call, entry->name);
  const TimePoint begin = agent->runtime().executor.now();
  auto finish = [agent, call, begin, name = entry->name, deliver](const ValuePtr& value,
                                                                  std::exception_ptr error) {
    agent->runtime().executor.process().end_child(agent->self().name);
    agent->runtime().spans.record(
        SpanKind::kHandler, name, begin,
        SpanLink{.id = call->info.call, .peer = static_cast<std::int32_t>(call->peer), .bytes = call->bytes});
    deliver(value, error ? remote_failure(*agent, name, error) : nullptr);
  };
  Outcome outcome;
  try {
    const EnvironmentScope serving(Environment::of_call(call));
    Execution invocation{agent->worker(), decoder, agent->continuations(),
                         std::make_shared<CapturedTaskEnvironment>()};
    outcome = entry->run(invocation);
  } catch (...) {
    const std::exception_ptr thrown = std::current_exception();
    finish(nullptr, thrown ? thrown : thread_ended(*agent, entry->name));
    if (!thrown) throw;
    return;
  }
  if (!outcome.later.valid()) return finish(outcome.value, nullptr);
  outcome.later.add_done_callback([finish](Future<ValuePtr> done) {
    if (done.error()) return finish(nullptr, done.error());
    finish(done.wait(), nullptr);
  });
}

void reply_with(const ValuePtr& value, const std::shared_ptr<Completion>& reply) {
  wire::Payload payload;
  wire::Encoder encoder(payload);
  value->encode(encoder);
  encoder.finish();
  reply->succeed(payload);
}

void acknowledge(const std::shared_ptr<Completion>& reply) {
  wire::Payload payload = wire::to_payload(Unit{});
  reply->succeed(payload);
}

void serve_call(const std::shared_ptr<RpcAgent>& agent, const IncomingPtr& call,
                const std::shared_ptr<Completion>& reply) {
  run_entry(agent, call, [agent, call, reply](const ValuePtr& value, std::exception_ptr error) {
    if (error) return reply->fail(error);
    try {
      reply_with(value, reply);
    } catch (...) {
      reply->fail(encoding_failure(*agent, call->name));
    }
  });
}

/// Fills the new reference with what `run` delivers.
void create(const std::shared_ptr<RpcAgent>& agent, const IncomingPtr& call,
            const std::shared_ptr<Completion>& reply, const std::function<void(Deliver)>& run) {
  const wire::Handle& handle = call->creation;
  const auto* site = call->frame.blob(kSiteBlob);
  auto owner = agent->references().arriving_creation(handle, call->from(), site ? site->bytes : BytesView());
  auto deliver = [agent, owner, reply](const ValuePtr& value, std::exception_ptr error) {
    if (error) {
      owner->set_error(error);
      return reply->fail(error);
    }
    if (!agent->references().names().knows_type(owner->type_tag()))
      agent->references().names().check_and_add_type(owner->type_tag(), value->type_name());
    owner->set(value);
    acknowledge(reply);
  };
  try {
    run(deliver);
  } catch (abi::__forced_unwind&) {
    throw;
  } catch (...) {
    deliver(nullptr, std::current_exception());
  }
}

struct DynamicCall {
  std::string name;
  std::vector<c10::IValue> args;
  std::map<std::string, c10::IValue> kwargs;
};

DynamicCall decode_dynamic(RpcAgent& agent, IncomingCall& call, wire::Decoder& decoder) {
  DynamicCall dynamic;
  dynamic.name = wire::decode<std::string>(decoder);
  dynamic.args = wire::decode<std::vector<c10::IValue>>(decoder);
  dynamic.kwargs = wire::decode<std::map<std::string, c10::IValue>>(decoder);
  decoder.expect_end();
  agent.serving().name(call, dynamic.name);
  return dynamic;
}

/// Runs `body`. LibTorch's own errors are user errors; those of TorchSpan keep their kind.
template <class F>
c10::IValue as_remote(RpcAgent& agent, const IncomingPtr& call, F&& body) {
  try {
    const EnvironmentScope serving(Environment::of_call(call));
    return body();
  } catch (const Error&) {
    throw;
  } catch (...) {
    std::rethrow_exception(remote_failure(agent, call->name, std::current_exception()));
  }
}

/// Runs an ATen operator or a TorchScript function by name.
c10::IValue run_by_name(RpcAgent& agent, const IncomingPtr& call) {
  wire::Decoder decoder(call->payload);
  DynamicCall dynamic = decode_dynamic(agent, *call, decoder);
  return as_remote(agent, call, [&] {
    if (const ScriptEntry* script = agent.functions().find_script(dynamic.name))
      return script->run(std::move(dynamic.args), dynamic.kwargs);
    return call_operator(dynamic.name, std::move(dynamic.args), dynamic.kwargs);
  });
}

/// Runs a TorchScript method of the value behind the reference.
c10::IValue run_method(RpcAgent& agent, const IncomingPtr& call) {
  wire::Decoder decoder(call->payload);
  auto reference = std::static_pointer_cast<Reference>(decoder.reference());
  if (!reference) throw_invalid("a method was called without its object");
  DynamicCall dynamic = decode_dynamic(agent, *call, decoder);
  return as_remote(agent, call, [&] {
    const ValuePtr object = reference->value(Deadline::never());  // ready: its call waited for it
    return call_method(*object, dynamic.name, std::move(dynamic.args), dynamic.kwargs);
  });
}

template <auto kRun>
void serve_dynamic(const std::shared_ptr<RpcAgent>& agent, const IncomingPtr& call,
                   const std::shared_ptr<Completion>& reply) {
  wire::Payload payload = wire::to_payload(kRun(*agent, call));
  reply->succeed(payload);
}

template <auto kRun>
void create_dynamic(const std::shared_ptr<RpcAgent>& agent, const IncomingPtr& call,
                    const std::shared_ptr<Completion>& reply) {
  create(agent, call, reply,
         [&](const Deliver& deliver) { deliver(make_value<c10::IValue>(kRun(*agent, call)), nullptr); });
}

void serve_fetch(const std::shared_ptr<RpcAgent>& agent, const IncomingPtr& call,
                 const std::shared_ptr<Completion>& reply) {
  if (call->payload.references.size() != 1 || !call->payload.references[0]) {
    throw_invalid("a fetch arrived without its reference");
  }
  auto reference = std::static_pointer_cast<Reference>(call->payload.references[0]);
  const ValuePtr value = reference->value(Deadline::never());
  try {
    reply_with(value, reply);
  } catch (...) {
    reply->fail(encoding_failure(*agent, call->name));
  }
}

template <Message M, class F>
void add_control(RpcAgent& agent, F answer) {
  agent.server().add_handler(
      M::kType, {std::string(M::kName), RunOn::kDispatcher, false,
                 [answer](const IncomingPtr& call, const std::shared_ptr<Completion>& reply) {
                   wire::Payload payload =
                       wire::to_payload(answer(wire::from_payload<M>(call->payload), call->from()));
                   reply->succeed(payload);
                 }});
}

/// Adds the handlers of the reference protocol's messages.
void install_control(RpcAgent& agent) {
  using Kind = RRefMessage::Kind;
  RRefDriver& references = agent.references().driver();
  add_control<ForkRequest>(agent, [&](const ForkRequest& m, PeerId from) {
    return references.receive({Kind::kForkRequest, {0, m.incarnation}, m.value, m.fork, m.number, {}}, from);
  });
  add_control<ChildAccept>(agent, [&](const ChildAccept& m, PeerId from) {
    references.receive({Kind::kChildAccept, {}, m.value, m.fork, 0, {}}, from);
    return Unit();
  });
  add_control<UserDelete>(agent, [&](const UserDelete& m, PeerId from) {
    references.receive({Kind::kUserDelete, {}, m.value, m.fork, 0, {}}, from);
    return Unit();
  });
  add_control<CreationGivenUp>(agent, [&](const CreationGivenUp& m, PeerId from) {
    references.receive({Kind::kGivenUp, {}, m.value, m.fork, 0, m.reason}, from);
    return Unit();
  });
  add_control<ForkAudit>(
      agent, [&](const ForkAudit& m, PeerId from) { return references.on_fork_audit(m.forks, from); });
}

}  // namespace

void install_handlers(RpcAgent& agent) {
  // The agent outlives its handlers: it waits for them before it ends.
  auto self = [&agent] { return std::static_pointer_cast<RpcAgent>(agent.shared_from_this()); };
  auto user = [&](wire::MessageType type, std::string name, auto serve) {
    agent.server().add_handler(
        type, {std::move(name), RunOn::kPool, true,
               [self, serve](const IncomingPtr& call, const std::shared_ptr<Completion>& reply) {
                 serve(self(), call, reply);
               }});
  };
  user(kCallFunction, "call", serve_call);
  user(kCreateRemote, "remote", [](const auto& agent, const auto& call, const auto& reply) {
    create(agent, call, reply, [&](const Deliver& deliver) { run_entry(agent, call, deliver); });
  });
  user(kFetch, "to_here", serve_fetch);
  user(kCallOperator, "operator", serve_dynamic<run_by_name>);
  user(kCreateByOperator, "remote operator", create_dynamic<run_by_name>);
  user(kCallMethod, "method", serve_dynamic<run_method>);
  user(kCreateByMethod, "remote method", create_dynamic<run_method>);
  // The request is served once its argument is ready, or fails with it.
  agent.server().add_handler(
      kAwaitCreation,
      {"creation", RunOn::kPool, false,
       [](const IncomingPtr&, const std::shared_ptr<Completion>& reply) { acknowledge(reply); }});
  install_control(agent);
}

void install_device_memory(RpcAgent& agent, const std::shared_ptr<DeviceMemory>& memory) {
  if (!memory) return;
  agent.server().add_handler(OfferDeviceMemory::kType,
                             {std::string(OfferDeviceMemory::kName), RunOn::kPool, false,
                              [memory](const IncomingPtr& call, const std::shared_ptr<Completion>& reply) {
                                const auto offer = wire::from_payload<OfferDeviceMemory>(call->payload);
                                wire::Payload payload = wire::to_payload(memory->answer(*call, offer));
                                reply->succeed(payload);
                              }});
  add_control<ReleaseDeviceMemory>(agent, [memory](const ReleaseDeviceMemory& release, PeerId from) {
    memory->returned(from, release);
    return Unit();
  });
}

}  // namespace torchspan::rpc
