#pragma once
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/owner_process.h>
#include <torchspan/detail/data_parallel/output_tensors.h>

namespace torchspan::sharded {

/// Whether values of a type are copied to cast the tensors in them: tensors, containers of the standard library that
/// hold only such types, and types with a data_parallel::OutputTensors of the user.
template <class T>
struct HoldsTensors : std::bool_constant<data_parallel::HasOutputTensors<T> && std::is_class_v<T> &&
                                         std::is_copy_constructible_v<T>> {};
template <>
struct HoldsTensors<std::string> : std::false_type {};
template <>
struct HoldsTensors<std::monostate> : std::false_type {};
template <class T>
struct HoldsTensors<std::shared_ptr<T>> : std::false_type {};
template <class... T>
struct HoldsTensors<std::variant<T...>> : std::false_type {};
template <class T>
struct HoldsTensors<std::optional<T>> : HoldsTensors<T> {};
template <class T>
struct HoldsTensors<std::vector<T>> : HoldsTensors<T> {};
template <class T, std::size_t N>
struct HoldsTensors<std::array<T, N>> : HoldsTensors<T> {};
template <class K, class V>
struct HoldsTensors<std::map<K, V>> : HoldsTensors<V> {};
template <class K, class V>
struct HoldsTensors<std::unordered_map<K, V>> : HoldsTensors<V> {};
template <class A, class B>
struct HoldsTensors<std::pair<A, B>> : std::conjunction<HoldsTensors<A>, HoldsTensors<B>> {};
template <class... T>
struct HoldsTensors<std::tuple<T...>> : std::conjunction<HoldsTensors<T>...> {};

/// Inputs that a forward may change are not copied.
template <class Input>
constexpr bool kIsCast = HoldsTensors<std::decay_t<Input>>::value &&
                         (!std::is_lvalue_reference_v<Input> ||
                          std::is_const_v<std::remove_reference_t<Input>>);

/// The argument for a parameter of type `Input`: a copy whose floating-point tensors have `dtype`, unless it is null;
/// or the input itself, if it has no tensors that are cast.
template <class Input>
std::conditional_t<kIsCast<Input>, std::decay_t<Input>, Input&&> cast_input(
    std::remove_reference_t<Input>& input, const std::optional<at::ScalarType>& dtype) {
  if constexpr (kIsCast<Input>) {
    std::decay_t<Input> copy(std::forward<Input>(input));
    auto cast = [&](at::Tensor& tensor) {
      if (dtype && tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != *dtype)
        tensor = tensor.to(*dtype);
    };
    data_parallel::visit_tensors(copy, cast);
    return copy;
  } else {
    static_cast<void>(dtype);
    return std::forward<Input>(input);
  }
}

/// For a forwarding reference: what cast_input() takes, so that it copies, and what it returns.
template <class Input>
using CastFrom =
    std::conditional_t<HoldsTensors<std::decay_t<Input>>::value, const std::decay_t<Input>&, Input&&>;
template <class Input>
using CastOf = std::conditional_t<HoldsTensors<std::decay_t<Input>>::value, std::decay_t<Input>, Input>;

template <class Module, class... Inputs>
concept RunsWith = requires(Module& module, Inputs&&... inputs) {
  module->forward(std::forward<Inputs>(inputs)...);
};

class Unit;

/// Base of modules that are units; see ts::Sharded. Without a FullyShardedDataParallel around it, such a module works
/// as the one that it is derived from.
class UnitModule {
 public:
  virtual ~UnitModule() = default;
  UnitModule() = default;
  UnitModule(const UnitModule&) = delete;
  UnitModule& operator=(const UnitModule&) = delete;

  std::shared_ptr<Unit> unit;            ///< null: not wrapped
  std::function<void()> before_forward;  ///< called if `unit` is null; empty: nothing
};

/// One forward of a unit: its parameters are gathered while it lives. Use it on the training thread.
class UnitForward {
 public:
  /// Collective: gathers. A failure reaches all ranks.
  explicit UnitForward(std::shared_ptr<Unit> unit);
  ~UnitForward();
  UnitForward(const UnitForward&) = delete;
  UnitForward& operator=(const UnitForward&) = delete;

  /// Returns stand-ins for the output tensors; backward through them gathers again.
  std::vector<at::Tensor> finish(std::vector<at::Tensor> outputs);
  /// Call it while handling an exception of the forward: the other ranks fail, too.
  void failed() noexcept;

 private:
  class Impl;
  ProcessOwned<Impl> impl_;
};

/// The dtype to which a unit casts its inputs; nullopt: none.
std::optional<at::ScalarType> input_dtype(const std::shared_ptr<Unit>& unit);

/// Throws Error{kUnsupported} if the module is a unit of a FullyShardedDataParallel.
void refuse_clone(const UnitModule& module);

/// Runs `forward` with the unit's parameters gathered.
template <class Forward>
auto run_unit(const std::shared_ptr<Unit>& unit, Forward&& forward) {
  UnitForward scope(unit);
  try {
    auto result = forward();
    std::vector<at::Tensor> outputs;
    auto collect = [&](at::Tensor& tensor) { outputs.push_back(tensor); };
    data_parallel::visit_tensors(result, collect);
    outputs = scope.finish(std::move(outputs));
    std::size_t next = 0;
    auto replace = [&](at::Tensor& tensor) { tensor = std::move(outputs[next++]); };
    data_parallel::visit_tensors(result, replace);
    return result;
  } catch (...) {
    scope.failed();
    throw;
  }
}

}  // namespace torchspan::sharded
