#pragma once
#include <memory>
#include <type_traits>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <torchspan/detail/sharded/unit_forward.h>

namespace torchspan {
namespace sharded {

/// The argument of torch::nn::Module::clone(), whose type depends on LibTorch's version.
template <class Method>
struct ArgumentOf;
template <class Result, class Owner, class Argument>
struct ArgumentOf<Result (Owner::*)(Argument) const> {
  using Type = Argument;
};
using CloneDevice = std::decay_t<ArgumentOf<decltype(&torch::nn::Module::clone)>::Type>;

}  // namespace sharded

template <class Base, class Forward = decltype(&Base::forward)>
class ShardedImpl;

/// `Base` as a unit of a FullyShardedDataParallel, or of a ZeroRedundancyOptimizer with overlap_forward: same
/// constructors, names and forward, whose default arguments are lost. `Base` has exactly one forward, not a
/// template.
template <class Base, class Owner, class Result, class... Inputs>
class ShardedImpl<Base, Result (Owner::*)(Inputs...)> : public Base, public sharded::UnitModule {
 public:
  using Base::Base;

  std::decay_t<Result> forward(Inputs... inputs) {
    if (!unit) {
      if (before_forward) before_forward();
      return Base::forward(std::forward<Inputs>(inputs)...);
    }
    return sharded::run_unit(unit, [&]() -> std::decay_t<Result> {
      const auto dtype = sharded::input_dtype(unit);
      return Base::forward(sharded::cast_input<Inputs>(inputs, dtype)...);
    });
  }
  /// A divided unit cannot be cloned: Error{kUnsupported}.
  std::shared_ptr<torch::nn::Module> clone(const sharded::CloneDevice& device = {}) const override {
    sharded::refuse_clone(*this);
    return Base::clone(device);
  }
};

template <class Base, class Owner, class Result, class... Inputs>
class ShardedImpl<Base, Result (Owner::*)(Inputs...) const>
    : public ShardedImpl<Base, Result (Owner::*)(Inputs...)> {
 public:
  using ShardedImpl<Base, Result (Owner::*)(Inputs...)>::ShardedImpl;
};

/// Holder of a module that is a unit: `ts::Sharded<Block>` replaces `Block` where a FullyShardedDataParallel should
/// gather the parameters of that layer separately. Units may contain units.
template <class Holder>
class Sharded : public torch::nn::ModuleHolder<ShardedImpl<typename Holder::ContainedType>> {
 public:
  using torch::nn::ModuleHolder<ShardedImpl<typename Holder::ContainedType>>::ModuleHolder;
};

}  // namespace torchspan
