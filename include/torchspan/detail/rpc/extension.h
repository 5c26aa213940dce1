#pragma once
#include <functional>
#include <memory>
#include <typeindex>
#include <typeinfo>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rpc/environment.h>
#include <torchspan/detail/rpc/message.h>

namespace torchspan {

class Worker;

namespace rpc {

/// Sees the tensors of every user call and of its reply, on both sides, and adds a small header of its own.
/// Called from the caller's thread on the way out, from a thread without locks on the way in; from several at
/// once.
class Interceptor {
 public:
  virtual ~Interceptor() = default;
  /// Names the header on the wire; at most 255 bytes, the same on all workers.
  virtual std::string_view name() const = 0;
  /// The message is about to leave. May replace tensors. What it returns travels; empty means no header.
  virtual Bytes outgoing(const CallInfo& call, std::span<at::Tensor> tensors) = 0;
  /// The message could not be sent after all: takes back what outgoing() did.
  virtual void undo(const CallInfo& call, BytesView header) = 0;
  /// A message with our header came, or a request without one. May replace tensors. Runs in an empty
  /// environment. For requests, returns what the environment of the handler has from us (or null).
  virtual EnvironmentValuePtr incoming(const CallInfo& call, std::span<at::Tensor> tensors,
                                       BytesView header) = 0;
};

/// Where a handler runs: on the pool; on the worker's dispatching thread, which is for microseconds without
/// waiting; or on whichever thread receives the message. The last may be a user's that waits for something
/// else and holds locks: such a handler takes only locks that nobody holds while waiting, and runs no code of
/// the user's.
enum class RunOn { kPool, kDispatcher, kReceiver };

/// What an extension may install, before the worker serves its first message.
class Registrar {
 public:
  using RawHandler = std::function<void(const CallInfo&, wire::Payload&, std::shared_ptr<Completion>)>;
  virtual ~Registrar() = default;

  virtual Worker& worker() = 0;
  virtual Runtime& runtime() = 0;
  virtual std::weak_ptr<FutureHost> host() = 0;
  /// `interceptor` must live as long as the extension.
  virtual void intercept(Interceptor& interceptor) = 0;
  /// Called once for each member of the world that died or left, on a thread without locks.
  virtual void on_departure(std::function<void(std::uint32_t rank, const Error& reason)> callback) = 0;
  /// Called at the start of a graceful shutdown; its future is waited for before the worker leaves.
  virtual void on_shutdown(std::function<Future<void>()> callback) = 0;
  virtual void handle_raw(wire::MessageType type, std::string name, RunOn where, RawHandler handler) = 0;

  /// Serves message M with `handler(const CallInfo&, M)`, which returns M::Reply or Future<M::Reply>, or
  /// throws. A future that is complete already is answered at once, on this thread.
  template <Message M, class F>
  void handle(RunOn where, F handler) {
    handle_raw(M::kType, std::string(M::kName), where,
               [handler = std::move(handler)](const CallInfo& call, wire::Payload& payload,
                                              std::shared_ptr<Completion> done) mutable {
                 using R = typename M::Reply;
                 using Returned = std::invoke_result_t<F&, const CallInfo&, M>;
                 if constexpr (std::is_same_v<Returned, Future<R>>) {
                   auto answer = [done](const Future<R>& reply) {
                     if (reply.error()) return done->fail(reply.error());
                     auto encoded = wire::to_payload(reply.wait());
                     done->succeed(encoded);
                   };
                   const Future<R> reply = handler(call, wire::from_payload<M>(payload));
                   if (reply.done()) return answer(reply);
                   reply.then(std::move(answer));
                 } else {
                   auto encoded = wire::to_payload(R(handler(call, wire::from_payload<M>(payload))));
                   done->succeed(encoded);
                 }
               });
  }
};

/// A room's part of a worker: message handlers, interceptors and state. Attached before the worker serves its
/// first message, found again by worker.extension<E>(), destroyed after the worker stopped.
class Extension {
 public:
  virtual ~Extension() = default;
  virtual void attach(Registrar& registrar) = 0;
};

}  // namespace rpc
}  // namespace torchspan
