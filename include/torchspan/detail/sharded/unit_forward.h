#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/owner_process.h>
#include <torchspan/detail/data_parallel/output_tensors.h>
#include <torchspan/detail/sharded/cast_input.h>

namespace torchspan::sharded {

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
