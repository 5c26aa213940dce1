#include <algorithm>
#include <exception>
#include <fmt/format.h>

#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/rpc/worker.h>

#include "core/api/throw_invalid.h"

namespace torchspan {
namespace {

/// Encodes what is called by name: an operator, a script function, or a method of `object`.
void encode_by_name(rpc::Request& request, const RRefBase* object, const std::string& name,
                    const std::vector<c10::IValue>& args, const std::map<std::string, c10::IValue>& kwargs) {
  wire::Encoder encoder(request.payload);
  if (object != nullptr) encoder.reference(object->state());
  wire::encode(encoder, name);
  wire::encode(encoder, args);
  wire::encode(encoder, kwargs);
  encoder.finish();
}

}  // namespace

Future<c10::IValue> Caller::rpc_async(const Destination& to, const std::string& operator_name,
                                      std::vector<c10::IValue> args,
                                      std::map<std::string, c10::IValue> kwargs) const {
  auto request = make_request(rpc::kCallOperator, operator_name.c_str(), to.site());
  encode_by_name(request, nullptr, operator_name, args, kwargs);
  return send<c10::IValue>(backend_->resolve(to), std::move(request));
}

c10::IValue Caller::rpc_sync(const Destination& to, const std::string& operator_name,
                             std::vector<c10::IValue> args, std::map<std::string, c10::IValue> kwargs) const {
  return rpc_async(to, operator_name, std::move(args), std::move(kwargs)).wait();
}

RRef<c10::IValue> Caller::remote(const Destination& to, const std::string& operator_name,
                                 std::vector<c10::IValue> args,
                                 std::map<std::string, c10::IValue> kwargs) const {
  auto request = make_request(rpc::kCreateByOperator, operator_name.c_str(), to.site());
  encode_by_name(request, nullptr, operator_name, args, kwargs);
  return begin_creation<c10::IValue>(backend_->resolve(to), std::move(request));
}

Future<c10::IValue> Caller::call_method(const RRefBase& rref, const std::string& method,
                                        std::vector<c10::IValue> args,
                                        std::map<std::string, c10::IValue> kwargs,
                                        SourceLocation site) const {
  auto request = make_request(rpc::kCallMethod, method.c_str(), site);
  encode_by_name(request, &rref, method, args, kwargs);
  return send<c10::IValue>(rref.owner().rank, std::move(request));
}

RRef<c10::IValue> Caller::create_by_method(const RRefBase& rref, const std::string& method,
                                           std::vector<c10::IValue> args,
                                           std::map<std::string, c10::IValue> kwargs,
                                           SourceLocation site) const {
  auto request = make_request(rpc::kCreateByMethod, method.c_str(), site);
  encode_by_name(request, &rref, method, args, kwargs);
  return begin_creation<c10::IValue>(rref.owner().rank, std::move(request));
}

namespace {

constexpr const char* kUserBarrier = "user.barrier";

Deadline deadline_of(rpc::WorkerBackend& backend, Duration timeout) {
  return timeout == Duration::zero() ? Deadline::never() : backend.runtime().executor.deadline_in(timeout);
}

}  // namespace

std::vector<Bytes> rpc::WorkerBackend::all_gather_bytes(const std::string& tag, const Bytes& mine,
                                                        const std::vector<std::string>& participants,
                                                        Deadline deadline) {
  const Gathering who = gathering(participants);
  const std::vector<Bytes> gathered = who.membership->all_gather_bytes(tag, mine, who.ranks, deadline);
  std::vector<Bytes> result;
  for (const int rank : who.asked) {
    const auto place = std::ranges::lower_bound(who.ranks, rank) - who.ranks.begin();
    result.push_back(gathered[static_cast<std::size_t>(place)]);
  }
  return result;
}

std::vector<Bytes> Worker::all_gather_bytes(const Bytes& mine, const std::vector<std::string>& participants,
                                            Duration timeout) const {
  return backend_->all_gather_bytes("user.all_gather", mine, participants, deadline_of(*backend_, timeout));
}

void Worker::barrier(const std::vector<std::string>& participants, Duration timeout) const {
  const rpc::Gathering who = backend_->gathering(participants);
  who.membership->barrier(kUserBarrier, who.ranks, deadline_of(*backend_, timeout));
}

Future<void> Worker::barrier_async(const std::vector<std::string>& participants, Duration timeout) const {
  auto promise = std::make_shared<Promise<void>>(backend_->continuations());
  Future<void> future = promise->future();
  try {
    const rpc::Gathering who = backend_->gathering(participants);
    who.membership->all_gather_bytes_async(
        kUserBarrier, {}, who.ranks, deadline_of(*backend_, timeout),
        [promise](const std::vector<Bytes>&, const std::optional<Error>& failure) {
          failure ? promise->set_error(std::make_exception_ptr(*failure)) : promise->set_value();
        });
  } catch (...) {
    promise->set_error(std::current_exception());
  }
  return future;
}

Future<void> Worker::delay(Duration time) const {
  backend_->check_running();
  auto promise = std::make_shared<Promise<void>>(backend_->continuations());
  Future<void> future = promise->future();
  backend_->after(std::max(time, Duration::zero()), [promise] { promise->set_value(); });
  return future;
}

rpc::Reference& RRefBase::held() const {
  if (!state_) {
    throw_invalid("this RRef is empty: it was default-constructed, or an empty one was sent");
  }
  return *state_;
}

WorkerInfo RRefBase::owner() const { return {held().backend()->name_of(held().owner()), held().owner()}; }

bool RRefBase::confirmed_by_owner() const {
  if (held().is_owner()) return true;
  const Future<void> ready = held().ready();
  return ready.done() && !ready.error();
}

Future<void> RRefBase::creation() const {
  if (!held().copied()) return held().ready();
  const auto backend = held().backend();
  rpc::Request request;
  request.type = rpc::kAwaitCreation;
  request.name = "creation";
  backend->apply({}, request);
  wire::Encoder encoder(request.payload);
  encoder.reference(state());
  encoder.finish();
  auto completion = std::make_shared<rpc::PromiseCompletion<void>>(backend->continuations());
  backend->send(held().owner(), std::move(request), completion);
  return completion->future();
}

std::string RRefBase::str() const {
  if (!valid()) return "RRef(empty)";
  const GlobalId value = state_->value_id();
  const GlobalId fork = state_->fork_id();
  std::string owner;
  try {
    owner = fmt::format("owned by '{}'", owner_name());
  } catch (const Error&) {  // its worker ended and no longer knows the others' names
    owner = fmt::format("owned by rank {}, used after shutdown()", state_->owner());
  }
  if (state_->is_owner()) return fmt::format("RRef(value {}:{}, {})", value.worker, value.local, owner);
  return fmt::format("RRef(value {}:{}, fork {}:{}, {})", value.worker, value.local, fork.worker, fork.local,
                     owner);
}

namespace rpc {

Error WorkerBackend::shut_down() const {
  if (!process_.is_current()) return OwnerProcess::forked(self().name);
  return Error(ErrorKind::kCancelled,
               fmt::format("worker '{}' was shut down; make no calls after shutdown(), and keep the Session "
                           "for as long as anything uses its worker",
                           self().name));
}

void WorkerBackend::check_running() const {
  if (is_stopping()) throw shut_down();
}

void check_reference_type(const Reference& reference, const std::string& type_name) {
  if (reference.type_tag() == wire::digest(type_name)) return reference.name_type(type_name);
  throw_invalid("an RRef<{}> was expected, but the received reference is of another type", type_name);
}

void fetch(const ReferencePtr& reference, CallOptions options, std::shared_ptr<Completion> completion) {
  auto backend = reference->backend();
  if (!reference->is_owner()) {
    const Future<void> ready = reference->ready();
    if (ready.done() && ready.error()) return completion->fail(ready.error());
  }
  Request request;
  request.type = kFetch;
  request.name = "to_here";
  backend->apply(options, request);
  request.user_values = true;
  wire::Encoder encoder(request.payload);
  encoder.reference(reference);
  encoder.finish();
  backend->send(reference->owner(), std::move(request), std::move(completion));
}

}  // namespace rpc
}  // namespace torchspan
