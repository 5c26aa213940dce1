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

/// Sees the tensors of every user call and reply, on both sides, and adds a small header. Called
/// concurrently: for outgoing messages on the caller's thread, for incoming ones on a thread without locks.
class Interceptor {
 public:
  virtual ~Interceptor() = default;
  /// Name of the header on the wire; at most 255 bytes, the same on all workers.
  virtual std::string_view name() const = 0;
  /// The bit of docs/wire.md without which a receiver must not get this header; 0: receivers may ignore it. Messages
  /// to a worker without the feature bypass outgoing().
  virtual std::uint32_t feature() const { return 0; }
  /// Called before a message is sent. May replace tensors. Returns the header; empty: none.
  virtual Bytes outgoing(const CallInfo& call, std::span<at::Tensor> tensors) = 0;
  /// Called if the message could not be sent: undoes outgoing().
  virtual void undo(const CallInfo& call, BytesView header) = 0;
  /// Called for a message with this header and for a request without one, in an empty environment. May
  /// replace tensors. For a request returns this extension's value in the handler's environment, or null.
  virtual EnvironmentValuePtr incoming(const CallInfo& call, std::span<at::Tensor> tensors,
                                       BytesView header) = 0;
};

/// Where a handler runs: on the pool; on the worker's dispatching thread, for microseconds without waiting;
/// or on the thread that receives the message. The last may be a user thread that waits elsewhere and holds
/// locks: such a handler may take only locks that are never held while waiting, and runs no user code.
enum class RunOn { kPool, kDispatcher, kReceiver };

/// What an extension may install before the worker serves its first message.
class Registrar {
 public:
  using RawHandler = std::function<void(const CallInfo&, wire::Payload&, std::shared_ptr<Completion>)>;
  virtual ~Registrar() = default;

  virtual Worker& worker() = 0;
  virtual Runtime& runtime() = 0;
  virtual std::weak_ptr<ContinuationExecutor> continuations() = 0;
  /// `interceptor` must live as long as the extension.
  virtual void intercept(Interceptor& interceptor) = 0;
  /// Called once for each member that died or left, on a thread without locks.
  virtual void on_departure(std::function<void(std::uint32_t rank, const Error& reason)> callback) = 0;
  /// Called when a graceful shutdown starts; the worker waits for the future before it leaves.
  virtual void on_shutdown(std::function<Future<void>()> callback) = 0;
  virtual void handle_raw(wire::MessageType type, std::string name, RunOn where, RawHandler handler) = 0;

  /// Serves message M with `handler(const CallInfo&, M)`, which returns M::Reply or Future<M::Reply>, or
  /// throws. A future that is already complete is answered at once, on this thread.
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
                   reply.add_done_callback(std::move(answer));
                 } else {
                   auto encoded = wire::to_payload(R(handler(call, wire::from_payload<M>(payload))));
                   done->succeed(encoded);
                 }
               });
  }
};

/// A component of a worker: message handlers, interceptors and state. Attached before the worker serves its
/// first message, found by worker.extension<E>(), destroyed after the worker stopped.
class Extension {
 public:
  virtual ~Extension() = default;
  virtual void attach(Registrar& registrar) = 0;
};

}  // namespace rpc
}  // namespace torchspan
