#pragma once
// Worker: calls, creations and references to values on other workers. Includes no torch/nn.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>

#include <torchspan/detail/rpc/call_group.h>
#include <torchspan/detail/rpc/worker_backend.h>
#include <torchspan/rpc/rref.h>

namespace torchspan {

/// The remote-call verbs with one set of call options. Cheap to copy; thread-safe. rpc_sync waits and returns the
/// result, rpc_async returns a future, remote leaves the result on the callee and returns an RRef at once. Arguments
/// convert to the function's declared types at compile time and are captured before the verb returns. Calls are
/// unordered: wait for A before issuing B. Throws Error: kRemoteFailure (user code threw; see frames()),
/// kDisconnected, kTimedOut, kInvalid (unknown worker or function), kCancelled (shut down).
class Caller {
 public:
  Caller(std::shared_ptr<rpc::WorkerBackend> backend, CallOptions options)
      : backend_(std::move(backend)), options_(std::move(options)) {}

  template <auto kFunction, class... Args>
  Future<rpc::ResultOf<kFunction>> rpc_async(const Destination& to, Function<kFunction> token,
                                             Args&&... args) const {
    static_assert(!rpc::kIsMember<kFunction>,
                  "a member function is called on an RRef: rref.rpc_async(token, …)");
    return call<kFunction>(backend_->resolve(to), to.site(), token, nullptr, std::forward<Args>(args)...);
  }
  template <auto kFunction, class... Args>
  rpc::ResultOf<kFunction> rpc_sync(const Destination& to, Function<kFunction> token, Args&&... args) const {
    return rpc_async(to, token, std::forward<Args>(args)...).wait();
  }
  template <auto kFunction, class... Args>
  RRef<Stored<rpc::ResultOf<kFunction>>> remote(const Destination& to, Function<kFunction> token,
                                                Args&&... args) const {
    static_assert(!rpc::kIsMember<kFunction>,
                  "a member function is called on an RRef: rref.remote(token, …)");
    return create<kFunction>(backend_->resolve(to), to.site(), token, nullptr, std::forward<Args>(args)...);
  }
  /// Constructs a T on another worker.
  template <class T, class... Params, class... Args>
  RRef<T> remote(const Destination& to, Class<T, Params...> token, Args&&... args) const {
    static_assert(std::is_constructible_v<std::tuple<std::remove_cvref_t<Params>...>, Args&&...>,
                  "these arguments do not fit the constructor that the token declares");
    auto request = make_request(rpc::kCreateRemote, token.name, to.site());
    wire::Encoder encoder(request.payload);
    wire::encode(encoder, backend_->id_of(token.name, &rpc::constructor_signature<T, Params...>));
    encode_all(encoder, std::tuple<std::remove_cvref_t<Params>...>(std::forward<Args>(args)...));
    encoder.finish();
    return begin_creation<T>(backend_->resolve(to), std::move(request));
  }
  /// Constructs a module of a ModuleClass on another worker.
  template <class Token, class... Args>
  requires requires(const Token& token) { token.constructor(); }
  auto remote(const Destination& to, const Token& token, Args&&... args) const {
    return remote(to, token.constructor(), std::forward<Args>(args)...);
  }

  /// Calls an ATen operator ("aten::add", or "aten::add.Tensor" for one overload) or a TorchScript function
  /// of the callee's table (FunctionTable::add_script) with positional and keyword arguments. Omitted
  /// arguments take their defaults. The callee selects the overload that accepts them; if none does,
  /// kInvalid lists the schemas.
  Future<c10::IValue> rpc_async(const Destination& to, const std::string& operator_name,
                                std::vector<c10::IValue> args,
                                std::map<std::string, c10::IValue> kwargs = {}) const;
  c10::IValue rpc_sync(const Destination& to, const std::string& operator_name, std::vector<c10::IValue> args,
                       std::map<std::string, c10::IValue> kwargs = {}) const;
  RRef<c10::IValue> remote(const Destination& to, const std::string& operator_name,
                           std::vector<c10::IValue> args,
                           std::map<std::string, c10::IValue> kwargs = {}) const;

  /// Calls a method of the TorchScript object behind an RRef<torch::jit::Module> or an RRef<c10::IValue>
  /// that holds an object.
  Future<c10::IValue> call_method(const RRefBase& rref, const std::string& method,
                                  std::vector<c10::IValue> args,
                                  std::map<std::string, c10::IValue> kwargs = {},
                                  SourceLocation site = SourceLocation::current()) const;
  RRef<c10::IValue> create_by_method(const RRefBase& rref, const std::string& method,
                                     std::vector<c10::IValue> args,
                                     std::map<std::string, c10::IValue> kwargs = {},
                                     SourceLocation site = SourceLocation::current()) const;

  /// Calls a function on the value of `rref`, on its owner: a member function, or a free function whose
  /// first parameter is the RRef.
  template <class T, auto kFunction, class... Args>
  Future<rpc::ResultOf<kFunction>> call_on(const RRef<T>& rref, Function<kFunction> token,
                                           Args&&... args) const {
    return call_on_from(token.site, rref, token, std::forward<Args>(args)...);
  }
  template <class T, auto kFunction, class... Args>
  RRef<Stored<rpc::ResultOf<kFunction>>> create_on(const RRef<T>& rref, Function<kFunction> token,
                                                   Args&&... args) const {
    return create_on_from(token.site, rref, token, std::forward<Args>(args)...);
  }
  /// Makes the same call with an explicit call site for errors.
  template <class T, auto kFunction, class... Args>
  Future<rpc::ResultOf<kFunction>> call_on_from(SourceLocation site, const RRef<T>& rref,
                                                const Function<kFunction>& token, Args&&... args) const {
    const std::uint32_t owner = rref.owner().rank;  // known even after it left
    if constexpr (rpc::kIsMember<kFunction>) {
      check_object<T, kFunction>();
      return call<kFunction>(owner, site, token, &rref.state(), std::forward<Args>(args)...);
    } else {
      return call<kFunction>(owner, site, token, nullptr, rref, std::forward<Args>(args)...);
    }
  }
  template <class T, auto kFunction, class... Args>
  RRef<Stored<rpc::ResultOf<kFunction>>> create_on_from(SourceLocation site, const RRef<T>& rref,
                                                        const Function<kFunction>& token,
                                                        Args&&... args) const {
    const std::uint32_t owner = rref.owner().rank;  // known even after it left
    if constexpr (rpc::kIsMember<kFunction>) {
      check_object<T, kFunction>();
      return create<kFunction>(owner, site, token, &rref.state(), std::forward<Args>(args)...);
    } else {
      return create<kFunction>(owner, site, token, nullptr, rref, std::forward<Args>(args)...);
    }
  }

  /// Sends a message of an extension (detail/rpc/message.h) and returns its reply.
  template <rpc::Message M>
  Future<typename M::Reply> request(const Destination& to, const M& message, Deadline deadline) const {
    rpc::Request request = rpc::make_request(message);
    request.deadline = deadline;
    request.site = to.site();
    return send<typename M::Reply>(backend_->resolve(to), std::move(request));
  }
  template <rpc::Message M>
  Future<typename M::Reply> request(const Destination& to, const M& message) const {
    rpc::Request request = rpc::make_request(message);
    backend_->apply(options_, request);
    request.site = to.site();
    return send<typename M::Reply>(backend_->resolve(to), std::move(request));
  }

  const std::shared_ptr<rpc::WorkerBackend>& backend() const { return backend_; }

 protected:
  std::shared_ptr<rpc::WorkerBackend> backend_;
  CallOptions options_;
  std::shared_ptr<rpc::CallGroup> group_;  ///< set by WaitScope

 private:
  template <class T, auto kFunction>
  static constexpr void check_object() {
    static_assert(std::is_base_of_v<typename rpc::SignatureOf<kFunction>::Object, rpc::ObjectOf<T>>,
                  "this RRef's type has no such member function");
  }
  rpc::Request make_request(wire::MessageType type, const char* name, SourceLocation site) const {
    rpc::Request request;
    request.type = type;
    request.name = name;
    backend_->apply(options_, request);
    request.user_values = true;
    request.site = site;
    return request;
  }
  template <class... Args>
  static void encode_all(wire::Encoder& encoder, const std::tuple<Args...>& arguments) {
    std::apply([&](const Args&... args) { (wire::encode<Args>(encoder, args), ...); }, arguments);
  }
  template <auto kFunction, class... Args>
  rpc::Request plan(wire::MessageType type, SourceLocation site, const Function<kFunction>& token,
                    const rpc::ReferencePtr* object, Args&&... args) const {
    using Arguments = typename rpc::SignatureOf<kFunction>::Arguments;
    static_assert(std::is_constructible_v<Arguments, Args&&...>,
                  "these arguments do not fit the function that the token names (see Function<…> above)");
    auto request = make_request(type, token.name, site);
    wire::Encoder encoder(request.payload);
    wire::encode(encoder, backend_->id_of(token.name, &rpc::signature_of<kFunction>));
    if (object != nullptr) encoder.reference(*object);
    encode_all(encoder, Arguments(std::forward<Args>(args)...));
    encoder.finish();
    return request;
  }
  template <auto kFunction, class... Args>
  Future<rpc::ResultOf<kFunction>> call(std::uint32_t to, SourceLocation site,
                                        const Function<kFunction>& token, const rpc::ReferencePtr* object,
                                        Args&&... args) const {
    return send<rpc::ResultOf<kFunction>>(
        to, plan(rpc::kCallFunction, site, token, object, std::forward<Args>(args)...));
  }
  template <auto kFunction, class... Args>
  RRef<Stored<rpc::ResultOf<kFunction>>> create(std::uint32_t to, SourceLocation site,
                                                const Function<kFunction>& token,
                                                const rpc::ReferencePtr* object, Args&&... args) const {
    using R = Stored<rpc::ResultOf<kFunction>>;
    return begin_creation<R>(to, plan(rpc::kCreateRemote, site, token, object, std::forward<Args>(args)...));
  }
  template <class R>
  RRef<R> begin_creation(std::uint32_t to, rpc::Request request) const {
    auto reference = backend_->create(to, std::move(request), rpc::type_name_of<R>());
    if (group_) rpc::CallGroup::track(group_, reference->ready());
    return RRef<R>(std::move(reference));
  }
  template <class R>
  Future<R> send(std::uint32_t to, rpc::Request request) const {
    auto completion = std::make_shared<rpc::PromiseCompletion<R>>(backend_->continuations());
    Future<R> future = completion->future();
    backend_->send(to, std::move(request), std::move(completion));
    if (group_) rpc::CallGroup::track(group_, future);
    return future;
  }
};

/// This process's worker: the members of the world, the remote-call verbs and the worker's extensions. A
/// cheap handle; a served function may take one as its first parameter.
class Worker : public Caller {
 public:
  explicit Worker(std::shared_ptr<rpc::WorkerBackend> backend) : Caller(std::move(backend), {}) {}

  WorkerInfo info() const { return backend_->self(); }
  std::string name() const { return backend_->self().name; }
  int rank() const { return static_cast<int>(backend_->self().rank); }
  int world_size() const { return static_cast<int>(workers().size()); }
  /// All workers by rank; in an open world the current members.
  std::vector<WorkerInfo> workers() const { return backend_->workers(); }
  /// Looks a worker up by name, rank or info; throws Error{kInvalid} that lists the members.
  WorkerInfo info(const Destination& of) const { return backend_->info(of); }
  Runtime& runtime() const { return backend_->runtime(); }
  /// Makes a promise hosted by this worker: its threads run the waits and continuations of the future.
  template <class T>
  Promise<T> make_promise() const {
    return Promise<T>(backend_->continuations());
  }
  /// Starts a coroutine on this worker (core/task.h). It inherits this thread's environment: the call being
  /// served, the autograd context and grad mode.
  template <class T>
  Future<T> start(Task<T> task) const {
    return torchspan::start(std::move(task), backend_->continuations(),
                            std::make_shared<rpc::CapturedTaskEnvironment>());
  }

  /// The same verbs with other options: worker.with({.timeout = 5s}).rpc_sync(…).
  Caller with(CallOptions options) const { return Caller(backend_, std::move(options)); }
  /// In a handler, and in its coroutine and continuations: the call being served; elsewhere nullopt. Calls
  /// made there inherit its deadline and stop token unless CallOptions::detached is set.
  std::optional<CurrentCall> current_call() const { return backend_->current_call(); }
  /// Snapshot of pending calls, running handlers and references.
  DebugInfo debug() const { return backend_->debug(); }
  /// Sets the timeout of later calls that have no timeout option; 0: none.
  void set_default_timeout(Duration timeout) { backend_->set_default_timeout(timeout); }
  Duration default_timeout() const { return backend_->default_timeout(); }

  /// The extension of type E. Without it throws Error{kInvalid} that says what to add.
  template <class E>
  E& extension() const {
    return *static_cast<E*>(backend_->find_extension(typeid(E)));
  }

  /// Returns the bytes of every participant, in the order of `participants` (worker names; empty: all
  /// workers, by rank), once each has made the call the same number of times. Blocks for at most `timeout`
  /// (zero: no limit). Errors name late or dead participants.
  std::vector<Bytes> all_gather_bytes(const Bytes& mine, const std::vector<std::string>& participants = {},
                                      Duration timeout = Duration::zero()) const;
  /// Returns once every participant has called it.
  void barrier(const std::vector<std::string>& participants = {}, Duration timeout = Duration::zero()) const;
  /// Enters the same barrier and returns at once; the future completes, or fails, where barrier() returns or throws.
  Future<void> barrier_async(const std::vector<std::string>& participants = {},
                             Duration timeout = Duration::zero()) const;
  /// Completes after `time`; no thread waits: `co_await worker.delay(2ms)`. kCancelled if the worker stops.
  Future<void> delay(Duration time) const;
};

/// Marks a wait outside this library inside a handler (a lock, a file, another system): another thread
/// takes the handler's slot meanwhile, so blocked handlers do not starve the rest. Waits on futures need no
/// scope. Throws Error{kOverloaded} when no thread is left to run the work that could end the wait.
class BlockingScope {
 public:
  explicit BlockingScope(const Worker& worker) : scope_(worker.backend()->pool()) {}

 private:
  Pool::BlockingScope scope_;
};

/// A Caller whose calls are waited for together:
///   { WaitScope calls(worker); for (auto& shard : shards) calls.rpc_async(shard.worker, kLoad, shard.path);
///     calls.wait(); }
/// wait() returns when every call has its reply, or throws the first failure at once; remote() counts until
/// confirmed. The destructor waits for the rest, ignores failures and may add a thread to an exhausted
/// pool. Thread-safe. Throws Error{kInvalid} in a function declared kInline.
class WaitScope : public Caller {
 public:
  explicit WaitScope(const Worker& worker, CallOptions options = {});
  ~WaitScope();
  WaitScope(const WaitScope&) = delete;

  void wait();
  /// The same, or throws Error{kTimedOut} after `timeout`.
  void wait(Duration timeout);
};

/// An RRef with the options of the calls made through it: what RRef::with() returns.
template <class T>
class RRefCaller {
 public:
  RRefCaller(RRef<T> rref, CallOptions options) : rref_(std::move(rref)), options_(std::move(options)) {}

  template <auto kFunction, class... Args>
  rpc::ResultOf<kFunction> rpc_sync(Function<kFunction> token, Args&&... args) const {
    return caller().call_on_from(token.site, rref_, token, std::forward<Args>(args)...).wait();
  }
  template <auto kFunction, class... Args>
  Future<rpc::ResultOf<kFunction>> rpc_async(Function<kFunction> token, Args&&... args) const {
    return caller().call_on_from(token.site, rref_, token, std::forward<Args>(args)...);
  }
  template <auto kFunction, class... Args>
  RRef<Stored<rpc::ResultOf<kFunction>>> remote(Function<kFunction> token, Args&&... args) const {
    return caller().create_on_from(token.site, rref_, token, std::forward<Args>(args)...);
  }
  T to_here() const { return to_here_async().wait(); }
  Future<T> to_here_async() const { return rref_.fetch(options_); }

 private:
  Caller caller() const { return Caller(rref_.held().backend(), options_); }

  RRef<T> rref_;
  CallOptions options_;
};

template <class T>
RRefCaller<T> RRef<T>::with(CallOptions options) const {
  return RRefCaller<T>(*this, std::move(options));
}
template <class T>
RRef<T>::RRef(const Worker& worker, T value, SourceLocation site)
    : RRefBase(worker.backend()->own(rpc::make_value<T>(std::move(value)), rpc::type_name_of<T>(), site)) {}

template <class T>
Caller RRef<T>::caller() const {
  return Caller(held().backend(), {});
}

template <class T>
Future<T> RRef<T>::fetch(CallOptions options) const {
  static_assert(wire::Transferable<T>,
                "a T cannot be sent: call functions on its RRef, or specialize torchspan::Wire");
  auto completion = std::make_shared<rpc::PromiseCompletion<T>>(held().backend()->continuations());
  Future<T> future = completion->future();
  rpc::fetch(state(), options, std::move(completion));
  return future;
}

template <class T>
T RRef<T>::to_here() const {
  return fetch({}).wait();
}
template <class T>
T RRef<T>::to_here(Duration timeout) const {
  return fetch({.timeout = timeout}).wait();
}
template <class T>
Future<T> RRef<T>::to_here_async() const {
  return fetch({});
}
template <class T>
T& RRef<T>::local_value() const {
  return *static_cast<T*>(held().value(Deadline::never())->address());
}

template <class T>
template <auto kFunction, class... Args>
rpc::ResultOf<kFunction> RRef<T>::rpc_sync(Function<kFunction> token, Args&&... args) const {
  return caller().call_on_from(token.site, *this, token, std::forward<Args>(args)...).wait();
}
template <class T>
template <auto kFunction, class... Args>
Future<rpc::ResultOf<kFunction>> RRef<T>::rpc_async(Function<kFunction> token, Args&&... args) const {
  return caller().call_on_from(token.site, *this, token, std::forward<Args>(args)...);
}
template <class T>
template <auto kFunction, class... Args>
RRef<Stored<rpc::ResultOf<kFunction>>> RRef<T>::remote(Function<kFunction> token, Args&&... args) const {
  return caller().create_on_from(token.site, *this, token, std::forward<Args>(args)...);
}
template <class T>
c10::IValue RRef<T>::rpc_sync(const std::string& method, std::vector<c10::IValue> args,
                              std::map<std::string, c10::IValue> kwargs) const requires rpc::kScripted<T> {
  return caller().call_method(*this, method, std::move(args), std::move(kwargs)).wait();
}
template <class T>
Future<c10::IValue> RRef<T>::rpc_async(
    const std::string& method, std::vector<c10::IValue> args,
    std::map<std::string, c10::IValue> kwargs) const requires rpc::kScripted<T> {
  return caller().call_method(*this, method, std::move(args), std::move(kwargs));
}
template <class T>
RRef<c10::IValue> RRef<T>::remote(
    const std::string& method, std::vector<c10::IValue> args,
    std::map<std::string, c10::IValue> kwargs) const requires rpc::kScripted<T> {
  return caller().create_by_method(*this, method, std::move(args), std::move(kwargs));
}

}  // namespace torchspan
