#pragma once
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/source_location.h>
#include <torchspan/detail/wire/frame.h>
#include <torchspan/rpc/options.h>
#include <torchspan/wire.h>

namespace torchspan {

template <>
struct Wire<GlobalId> : WireStruct<GlobalId, "GlobalId"> {};

namespace rpc {

/// A message is a struct with a type number, a name for errors and spans, and a reply type, that is sent by Wire<M>:
///   struct Ping { static constexpr auto kType = wire::MessageType{0x8001};
///                 static constexpr std::string_view kName = "room.ping";
///                 static constexpr FixedString kWireName = "room.Ping"; using Reply = Unit; std::int64_t n; };
/// It has one handler, registered by an extension (extension.h). A message that not all releases of a wire version
/// know has `static constexpr std::uint32_t kFeature`, its bit of docs/wire.md: other workers do not get it. Tensors of
/// a message with a `DevicePlace place`, which is not sent, may stay on devices.
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

/// Where the handler of a request without user values uses its tensors on devices. Such tensors may go there through
/// device memory that both workers map; a handler to which they may go must accept them on any device. To the worker
/// itself they stay on their devices, unless kHost.
struct DevicePlace {
  enum class By : std::uint8_t {
    kHost,       ///< on the CPU: they go through host memory
    kArguments,  ///< where the sender's device map places arguments
    kResults,    ///< where the receiver's device map places results
    kDevice,     ///< on `device`, one of the receiver
  };
  By by = By::kHost;
  c10::Device device = c10::kCPU;
};

/// An outgoing request.
struct Request {
  wire::MessageType type{};
  std::string name;  ///< in errors and spans
  wire::Payload payload;
  Deadline deadline;               ///< never: no limit
  bool served_late = false;        ///< the receiver serves it after the deadline, too, which it does not get
  std::stop_token stop;            ///< cancels the call, here and on its callee
  std::stop_token inherited_stop;  ///< of the call being served; also cancels this one
  bool user_values = false;        ///< interceptors see its tensors and the reply's
  bool user_call = false;  ///< without user values: the program's call all the same, which traces show
  bool no_grad = false;    ///< see CallOptions
  DevicePlace place = {};  ///< of tensors, without user values
  SourceLocation site;
  std::uint32_t feature =
      0;  ///< of the wire format; the send fails with kUnsupported if the receiver lacks it
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
  explicit PromiseCompletion(std::weak_ptr<ContinuationExecutor> continuations)
      : promise_(std::move(continuations)) {}
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

namespace rpc {
/// A request with message M and no deadline.
template <Message M>
Request make_request(const M& message) {
  Request request;
  request.type = M::kType;
  request.name = std::string(M::kName);
  request.payload = wire::to_payload(message);
  if constexpr (requires { M::kFeature; }) request.feature = M::kFeature;
  if constexpr (requires { message.place; }) request.place = message.place;
  return request;
}
}  // namespace rpc

}  // namespace torchspan
