#pragma once
// RRef: a reference to a value on any worker. Includes no torch/nn.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/rpc/worker_backend.h>

namespace torchspan {

class Caller;
template <class T>
class RRefCaller;
class Worker;

namespace rpc {
/// Whether a T may hold a TorchScript object, whose methods are called by name.
template <class T>
inline constexpr bool kScripted = std::is_same_v<T, c10::IValue> || std::is_same_v<T, torch::jit::Module>;
}  // namespace rpc

/// Type-independent part of an RRef. A default-constructed one is empty: it may be copied, and valid() and
/// str() work; every other use throws Error{kInvalid}.
class RRefBase {
 public:
  RRefBase() = default;
  explicit RRefBase(rpc::ReferencePtr state) : state_(std::move(state)) {}

  bool valid() const { return state_ != nullptr; }
  /// Whether the value is on this worker.
  bool is_owner() const { return held().is_owner(); }
  WorkerInfo owner() const;
  std::string owner_name() const { return owner().name; }
  /// Whether the owner has confirmed this reference; always true on the owner.
  bool confirmed_by_owner() const;
  /// Completes when the value has been created on its owner, or fails as the creation did. A reference
  /// received from another worker asks the owner, under the worker's default timeout.
  Future<void> creation() const;
  /// "RRef<Encoder>(value 0:3, fork 0:4, owner worker1)".
  std::string str() const;

  const rpc::ReferencePtr& state() const { return state_; }

 protected:
  /// The shared state behind the RRef; throws Error{kInvalid} for an empty one.
  rpc::Reference& held() const;

  rpc::ReferencePtr state_;
};

/// A reference to a T that is on one worker, usable from any. References are counted across workers: the value exists
/// as long as any of them does. A cheap handle; copy it and send it as an argument or result. Its verbs are defined in
/// <torchspan/rpc/worker.h>.
template <class T>
class RRef : public RRefBase {
 public:
  using RRefBase::RRefBase;
  /// Makes a value owned by this worker and a reference to it.
  RRef(const Worker& worker, T value, SourceLocation site = SourceLocation::current());

  /// Fetches a copy of the value from its owner. Throws what the creation threw, and Error{kUnsupported}
  /// for a type that cannot be sent.
  T to_here() const;
  T to_here(Duration timeout) const;
  Future<T> to_here_async() const;
  /// The value itself, on its owner only; waits for its creation. Elsewhere throws Error{kInvalid} that
  /// names both workers.
  T& local_value() const;

  /// Calls a member function of the value, or a free function whose first parameter is this RRef, on the
  /// owner.
  template <auto kFunction, class... Args>
  rpc::ResultOf<kFunction> rpc_sync(Function<kFunction> token, Args&&... args) const;
  template <auto kFunction, class... Args>
  Future<rpc::ResultOf<kFunction>> rpc_async(Function<kFunction> token, Args&&... args) const;
  template <auto kFunction, class... Args>
  RRef<Stored<rpc::ResultOf<kFunction>>> remote(Function<kFunction> token, Args&&... args) const;

  /// Returns the same verbs, and to_here(), with other options: rref.with({.timeout = 5s}).rpc_sync(token, …).
  RRefCaller<T> with(CallOptions options) const;

  /// Calls a method of the TorchScript object with positional and keyword arguments.
  c10::IValue rpc_sync(const std::string& method, std::vector<c10::IValue> args,
                       std::map<std::string, c10::IValue> kwargs = {}) const requires rpc::kScripted<T>;
  Future<c10::IValue> rpc_async(
      const std::string& method, std::vector<c10::IValue> args,
      std::map<std::string, c10::IValue> kwargs = {}) const requires rpc::kScripted<T>;
  RRef<c10::IValue> remote(const std::string& method, std::vector<c10::IValue> args,
                           std::map<std::string, c10::IValue> kwargs = {}) const requires rpc::kScripted<T>;

 private:
  friend class RRefCaller<T>;
  Caller caller() const;
  Future<T> fetch(CallOptions options) const;
};

namespace rpc {
/// Throws Error{kInvalid} unless the reference has that type.
void check_reference_type(const Reference& reference, const std::string& type_name);
/// Fetches the value from the owner.
void fetch(const ReferencePtr& reference, CallOptions options, std::shared_ptr<Completion> completion);
}  // namespace rpc

template <class T>
struct Wire<RRef<T>> {
  static std::string name() { return "RRef<" + rpc::type_name_of<T>() + ">"; }
  static void encode(wire::Encoder& encoder, const RRef<T>& value) { encoder.reference(value.state()); }
  static RRef<T> decode(wire::Decoder& decoder) {
    auto state = std::static_pointer_cast<rpc::Reference>(decoder.reference());
    if (state) rpc::check_reference_type(*state, rpc::type_name_of<T>());
    return RRef<T>(std::move(state));
  }
};

}  // namespace torchspan
