#pragma once
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/source_location.h>
#include <torchspan/detail/wire/frame.h>
#include <torchspan/wire.h>

namespace torchspan {

/// Identity of a worker. Can be sent as an argument; equal if name and rank are.
struct WorkerInfo {
  std::string name;
  std::uint32_t rank = 0;
  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;
};

template <>
struct Wire<GlobalId> : WireStruct<GlobalId, "GlobalId", &GlobalId::worker, &GlobalId::local> {};
template <>
struct Wire<WorkerInfo> : WireStruct<WorkerInfo, "WorkerInfo", &WorkerInfo::name, &WorkerInfo::rank> {};

namespace rpc {

/// A message is a struct with a type number and a reply type that is sent by Wire<M>:
///   struct Ping { static constexpr auto kType = wire::MessageType{0x8001};
///                 static constexpr std::string_view kName = "ping"; using Reply = Unit; std::int64_t n; };
/// It has one handler, registered by an extension (extension.h).
template <class M>
concept Message = wire::Transferable<M> && requires {
  { M::kType } -> std::convertible_to<wire::MessageType>;
  { M::kName } -> std::convertible_to<std::string_view>;
  typename M::Reply;
};

/// A message as interceptors see it.
struct CallInfo {
  wire::MessageType type{};
  std::string_view name;   ///< of the function, operator or message
  std::uint32_t peer = 0;  ///< rank of the other side
  std::uint64_t call = 0;  ///< links request and reply; counted by the caller
  bool reply = false;
  SourceLocation site = {};  ///< on the caller: the call site
  bool no_grad = false;      ///< see CallOptions; interceptors then see no tensors
};

/// An outgoing request.
struct Request {
  wire::MessageType type{};
  std::string name;  ///< in errors and spans
  wire::Payload payload;
  Deadline deadline;               ///< never: no limit
  std::stop_token stop;            ///< cancels the call, here and on its callee
  std::stop_token inherited_stop;  ///< of the call being served; also cancels this one
  bool user_values = false;        ///< interceptors see its tensors and the reply's
  bool no_grad = false;            ///< see CallOptions
  SourceLocation site;
};

/// Receives the outcome of a request: exactly one of the two is called, once, on a thread that holds no
/// lock. Neither may wait or run user callbacks.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual void succeed(wire::Payload& reply) = 0;
  virtual void fail(std::exception_ptr error) = 0;
};

template <class R>
class PromiseCompletion final : public Completion {
 public:
  explicit PromiseCompletion(std::weak_ptr<FutureHost> host) : promise_(std::move(host)) {}
  Future<R> future() const { return promise_.future(); }
  void succeed(wire::Payload& reply) override {
    promise_.set_from([&]() -> R {
      if constexpr (std::is_void_v<R>) {
        wire::from_payload<Unit>(reply);
      } else {
        return wire::from_payload<R>(reply);
      }
    });
  }
  void fail(std::exception_ptr error) override { promise_.set_error(std::move(error)); }

 private:
  Promise<R> promise_;
};

}  // namespace rpc

/// Where a call goes: a worker's name, rank or info. Records the call site for errors.
class Destination {
 public:
  Destination(const char* name, SourceLocation site = SourceLocation::current()) : name_(name), site_(site) {}
  Destination(std::string name, SourceLocation site = SourceLocation::current())
      : name_(std::move(name)), site_(site) {}
  Destination(const WorkerInfo& info, SourceLocation site = SourceLocation::current())
      : rank_(info.rank), site_(site) {}
  template <std::integral I>
  Destination(I rank, SourceLocation site = SourceLocation::current())
      : rank_(static_cast<std::int64_t>(rank)), site_(site) {}

  const std::string& name() const { return name_; }
  std::optional<std::int64_t> rank() const { return rank_; }
  const SourceLocation& site() const { return site_; }

 private:
  std::string name_;
  std::optional<std::int64_t> rank_;
  SourceLocation site_;
};

/// The call that a handler serves: Worker::current_call(). A std::stop_callback on its stop token runs on
/// the worker's internal thread: it must be short and never wait.
struct CurrentCall {
  WorkerInfo caller;
  std::string name;      ///< of the function, operator or method
  Deadline deadline;     ///< the caller's; never: no limit
  std::stop_token stop;  ///< set on cancel, loss of the caller, deadline or shutdown
};

/// Options of individual calls, for Worker::with().
struct CallOptions {
  /// Timeout at the caller; unset: the worker's default (60 s). Zero: no limit. The callee receives the
  /// remaining time.
  std::optional<Duration> timeout = {};
  /// Cancels the call: it fails at once with kCancelled, and its handler's stop token is set.
  std::stop_token stop = {};
  /// By default a call made by a handler ends with the call being served: at its deadline and when it is
  /// cancelled. True: it does not.
  bool detached = false;
  /// For evaluation. The callee runs the function, and the calls that it makes, under at::NoGradGuard and
  /// without an autograd context. Tensors are sent without their graphs, both ways, and without a warning.
  bool no_grad = false;
};

namespace rpc {
/// A request with message M and no deadline.
template <Message M>
Request make_request(const M& message) {
  Request request;
  request.type = M::kType;
  request.name = std::string(M::kName);
  request.payload = wire::to_payload(message);
  return request;
}
}  // namespace rpc

}  // namespace torchspan

template <>
struct std::hash<torchspan::WorkerInfo> {
  std::size_t operator()(const torchspan::WorkerInfo& worker) const noexcept {
    return std::hash<std::string>()(worker.name) ^ worker.rank;
  }
};
