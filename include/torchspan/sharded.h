#pragma once
// Data-parallel training with divided state: ZeroRedundancyOptimizer, and FullyShardedDataParallel over Sharded
// units. Layers whose parts lie on several ranks are in sharded/tensor_parallel.h. Includes torch/nn.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <torchspan/collective.h>
#include <torchspan/data_parallel.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/sharded/unit_forward.h>
#include <torchspan/optim/optimizer.h>
#include <torchspan/sharded/functional.h>
#include <torchspan/state/source.h>

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

namespace sharded {

/// dtypes of a training step, as PyTorch's MixedPrecisionPolicy of fully_shard(). Optimizer, checkpoints and parameters
/// outside of units keep the dtype of the module; only floating-point tensors are cast.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = std::nullopt;  ///< of gathered parameters; none: the module's
  std::optional<at::ScalarType> reduce_dtype =
      std::nullopt;  ///< of reductions of gradients; none: the module's
  std::optional<at::ScalarType> output_dtype =
      std::nullopt;                 ///< of the whole module's outputs; none: as computed
  bool cast_forward_inputs = true;  ///< to param_dtype: inputs of units and of the whole module
};

/// Options of FullyShardedDataParallel. Must be equal on all ranks.
struct FullyShardedOptions {
  /// Frees a unit's parameters after its forward. False: they stay gathered until its backward, which saves a gather
  /// and costs memory (ZeRO stage 2).
  bool reshard_after_forward = true;
  bool prefetch = true;      ///< gathers the next unit while one computes
  bool initial_sync = true;  ///< rank 0's parameters and buffers; false: those of each rank must be equal
  /// Gradients of parameters of at least this size are reduced alone, as soon as backward has computed them, from the
  /// last such parameter of a unit to the first; those of smaller ones together.
  std::size_t alone_bytes = std::size_t{1} << 20;
  /// Limit of the gradients that are reduced while backward continues. Beyond it, backward waits.
  std::size_t overlap_bytes = std::size_t{16} << 20;
  /// Over shared memory, the parameters of a unit of at least this size are not copied when they are gathered: each rank
  /// reads the others' parts where they are, and must not write to gathered parameters (SIGSEGV). 0: all are copied, as
  /// those with another param_dtype are anyway.
  std::size_t mapped_bytes = std::size_t{1} << 20;
  MixedPrecision precision = {};
  /// Hybrid sharding: this many adjacent ranks, such as those of a host, divide one copy of the model, and the copies
  /// average their gradients. Must divide the number of ranks; 0: all ranks have one copy.
  int shard_ranks = 0;
};

class ShardedModel;

}  // namespace sharded

/// Builds the units of a model one at a time and divides each at once, so that no rank ever allocates the whole
/// model. Pass it to the model's constructor, and then to FullyShardedDataParallel. Use it from one thread.
class UnitBuilder {
 public:
  /// Collective.
  explicit UnitBuilder(const collective::Group& group, sharded::FullyShardedOptions options = {});

  /// Collective: constructs `ts::Sharded<Holder>` and divides its parameters, of which it keeps this rank's part of rank
  /// 0's values. All ranks build the same units in the same order; an exception on one rank breaks the group. Later
  /// units must not share their parameters.
  template <class Holder, class... Arguments>
  Sharded<Holder> build(Arguments&&... arguments) {
    try {
      Sharded<Holder> unit(std::forward<Arguments>(arguments)...);
      divide(*unit);
      return unit;
    } catch (...) {
      failed();
      throw;
    }
  }

  const std::shared_ptr<sharded::ShardedModel>& model() const { return model_; }

 private:
  void divide(torch::nn::Module& unit);
  void failed() noexcept;

  const std::shared_ptr<sharded::ShardedModel> model_;
};

namespace sharded {

struct FullyShardedStats {
  std::vector<std::string> units;  ///< names; "" is the root, whose parameters are in no other unit
  std::size_t part_bytes = 0;      ///< of this rank's parts of the parameters
  std::size_t mapped_bytes = 0;    ///< of parameters that are read where the ranks keep them
  std::size_t peak_bytes = 0;      ///< largest memory of copied units and of gradients in reductions
  std::uint64_t gathers = 0;       ///< of units
};

/// The untyped half of FullyShardedDataParallel.
class WrappedUnits {
 public:
  WrappedUnits(std::shared_ptr<torch::nn::Module> module, collective::Group group,
               FullyShardedOptions options);
  WrappedUnits(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<ShardedModel> model);
  ~WrappedUnits();
  WrappedUnits(const WrappedUnits&) = delete;
  WrappedUnits& operator=(const WrappedUnits&) = delete;

  /// Begins a forward of the whole module; returns the root.
  const std::shared_ptr<Unit>& begin_forward();
  /// Later forwards do not reduce gradients until resume_reductions() was called as often.
  void pause_reductions();
  void resume_reductions();
  bool agree(bool ok);
  void zero_grad();
  double clip_grad_norm(double max_norm, double norm_type);
  bool on_any_rank(bool finding);
  void with_full_parameters(const std::function<void()>& body);
  state::SourcePtr module_source();
  state::SourcePtr optimizer_source(optim::Optimizer& optimizer);
  FullyShardedStats stats() const;

 private:
  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<ShardedModel> model_;
};

}  // namespace sharded

/// Data-parallel wrapper that divides parameters, gradients and optimizer state among the ranks (Zhao et al., PyTorch
/// FSDP, VLDB 2023). The parameters of a unit (a ts::Sharded module, or the rest of the model) are whole only during
/// its forward and backward. Otherwise `parameters()` are this rank's parts, of one dimension, and `.grad` the parts
/// of the averages, for any optimizer that updates each element separately. Use it from the training thread.
template <class Module>
class FullyShardedDataParallel {
 public:
  /// Collective: divides the parameters, in place. Throws Error{kInvalid} on every rank, naming the parameter, if
  /// models, units or options differ. A parameter of two units belongs to the root.
  FullyShardedDataParallel(Module module, collective::Group group, sharded::FullyShardedOptions options = {})
      : module_(std::move(module)),
        wrapped_(std::make_shared<sharded::WrappedUnits>(data_parallel::pointer_to(module_), std::move(group),
                                                         options)) {}
  /// The same with the group and options of a builder, which has divided units of the module.
  FullyShardedDataParallel(Module module, const UnitBuilder& builder)
      : module_(std::move(module)),
        wrapped_(
            std::make_shared<sharded::WrappedUnits>(data_parallel::pointer_to(module_), builder.model())) {}

  /// Runs the module's forward. Collective, also under NoGradGuard: all ranks run the same units in the same order.
  /// An exception on one rank fails the others' operations with its reason and breaks the group.
  template <class... Inputs>
  auto forward(Inputs&&... inputs) {
    const auto& root = wrapped_->begin_forward();
    return sharded::run_unit(root, [&] {
      if constexpr (sharded::RunsWith<Module, sharded::CastOf<Inputs>...>) {
        const auto dtype = sharded::input_dtype(root);
        return module_->forward(sharded::cast_input<sharded::CastFrom<Inputs>>(inputs, dtype)...);
      } else {
        return module_->forward(std::forward<Inputs>(inputs)...);
      }
    });
  }
  template <class... Inputs>
  auto operator()(Inputs&&... inputs) {
    return forward(std::forward<Inputs>(inputs)...);
  }

  /// While it lives, backward passes of new forwards keep whole gradients on this rank and reduce nothing. The first
  /// reduced pass afterwards averages the sums. Costs the memory of all gradients, which are not in `.grad`.
  using NoSync = data_parallel::NoSync<sharded::WrappedUnits>;
  [[nodiscard]] NoSync no_sync() { return NoSync(wrapped_); }

  /// Resets every `.grad` to undefined and drops what passes under no_sync() have accumulated, which zero_grad() of an
  /// optimizer or a module leaves. Call it between passes, on all ranks.
  void zero_grad() { wrapped_->zero_grad(); }

  /// As DistributedDataParallel::agree(): whether `ok` is true on all ranks, before backward or after it. A rank that calls it
  /// instead of a forward lets the others wait in theirs until the timeout.
  [[nodiscard]] bool agree(bool ok) { return wrapped_->agree(ok); }

  /// Scales all gradients to a total norm of at most `max_norm`; returns the norm before scaling. Collective.
  double clip_grad_norm(double max_norm, double norm_type = 2) {
    return wrapped_->clip_grad_norm(max_norm, norm_type);
  }
  /// Whether `finding` is true on any rank. Collective; for GradScalerOptions::agree, because each rank has other
  /// parts of the gradients.
  bool on_any_rank(bool finding) { return wrapped_->on_any_rank(finding); }
  /// Collective: runs `body` while all parameters are whole, for example to save them on one rank. Each rank keeps
  /// the changes of its parts.
  template <class Body>
  void with_full_parameters(Body&& body) {
    wrapped_->with_full_parameters(std::forward<Body>(body));
  }

  /// The parameters and buffers under the module's names, for CheckpointManager::add(): any number of ranks, and
  /// programs without sharding, can restore them.
  state::SourcePtr state_source() { return wrapped_->module_source(); }
  /// The same for an optimizer of this module's parameters, made as optim::Optimizer(*module, spec).
  state::SourcePtr optimizer_source(optim::Optimizer& optimizer) {
    return wrapped_->optimizer_source(optimizer);
  }

  Module& module() { return module_; }
  const Module& module() const { return module_; }
  sharded::FullyShardedStats stats() const { return wrapped_->stats(); }

 private:
  Module module_;
  std::shared_ptr<sharded::WrappedUnits> wrapped_;
};

using sharded::FullyShardedOptions;
using sharded::MixedPrecision;

namespace sharded {

/// Options of ZeroRedundancyOptimizer. Must be equal on all ranks.
struct ZeroOptions {
  /// Releases the memory of the other ranks' parts of a bucket as soon as it is reduced, so that a rank keeps its part
  /// of the gradients and few whole buckets (ZeRO stage 2). Costs page faults in each backward pass. Has no effect on
  /// devices or without DataParallelOptions::gradient_as_bucket_view.
  bool divide_gradients = false;
  /// step() returns while the other ranks' parts of the parameters arrive. The next forward of the wrapper waits for
  /// them, that of a ts::Sharded module for its own; call synchronize() before you use parameters in another way.
  bool overlap_forward = false;
};

}  // namespace sharded

/// Optimizer of a DistributedDataParallel whose state is divided among the ranks: each rank keeps the state of its
/// part of every bucket, steps that part, and gathers the others (Rajbhandari et al., ZeRO, SC 2020). Gradients are
/// reduce-scattered, so `.grad` holds averages in this rank's part only: use clip_grad_norm() and zero_grad() of
/// this class. For optimizers that update each element separately. Use it from the training thread.
class ZeroRedundancyOptimizer : public optim::LRTarget {
 public:
  using GradientOf = optim::Optimizer::GradientOf;

  /// Collective, before the first backward pass. Optimizes all parameters that `ddp` averages; sets its
  /// communication hook and moves its parameters into flat buffers. Throws Error{kUnsupported} on all ranks for
  /// SparseAdam, optimizers that are not in this library, sparse gradients and parameters that are not contiguous.
  template <class Module>
  ZeroRedundancyOptimizer(DistributedDataParallel<Module>& ddp, optim::OptimizerSpec spec,
                          sharded::ZeroOptions options = {})
      : ZeroRedundancyOptimizer(ddp.wrapped(), std::move(spec), options) {}
  /// The same for some parameters, in groups with separate options.
  template <class Module>
  ZeroRedundancyOptimizer(DistributedDataParallel<Module>& ddp, std::vector<optim::ParamGroup> groups,
                          sharded::ZeroOptions options = {})
      : ZeroRedundancyOptimizer(ddp.wrapped(), std::move(groups), options) {}
  ZeroRedundancyOptimizer(const std::shared_ptr<data_parallel::WrappedModule>& wrapped,
                          optim::OptimizerSpec spec, sharded::ZeroOptions options = {});
  ZeroRedundancyOptimizer(const std::shared_ptr<data_parallel::WrappedModule>& wrapped,
                          std::vector<optim::ParamGroup> groups, sharded::ZeroOptions options = {});
  ~ZeroRedundancyOptimizer() override;
  ZeroRedundancyOptimizer(const ZeroRedundancyOptimizer&) = delete;
  ZeroRedundancyOptimizer& operator=(const ZeroRedundancyOptimizer&) = delete;

  /// Collective: updates every parameter that has a gradient on any rank and clears all gradients. A failure on one
  /// rank before the update throws on all and changes nothing. Without a successful reduction since the last step or
  /// zero_grad() it throws Error{kInvalid}. `gradient_of`: where the averages are instead of `.grad`, after
  /// context.backward(): `[&](const at::Tensor& parameter) { return context.gradient(parameter); }`.
  void step(const GradientOf& gradient_of = {});
  /// With overlap_forward: returns when all parameters have arrived. Throws what the gathers threw; the parameters are
  /// then incomplete.
  void synchronize();
  /// With overlap_forward: number of buckets whose parameters may still arrive.
  std::size_t arriving() const;
  /// Scales the averages to a total norm of at most `max_norm`; returns the norm before scaling. Collective.
  double clip_grad_norm(double max_norm, double norm_type = 2, const GradientOf& gradient_of = {});
  /// Divides the averages by `scale`; returns whether one is not finite on any rank. Collective; GradScaler calls it.
  /// Throws Error{kUnsupported} in join().
  bool unscale(double scale);
  /// Resets every `.grad` to undefined. In join(), ranks without batches wait after each reduction until the others
  /// call step() or this: to skip a step, call it on all ranks that have batches, before their next forward. Throws
  /// Error{kInvalid} there, and clears nothing, if one of them calls step() instead.
  void zero_grad();

  std::vector<double> lrs() const override;
  void set_lrs(const std::vector<double>& rates) override;
  void set_lr(double lr);
  /// This rank's part of the state, for CheckpointManager::add(), which saves it under the names of
  /// optim::Optimizer: any number of ranks can restore it, with or without ZeRO. Saving and restoring throw
  /// Error{kInvalid} while parameters arrive.
  state::SourcePtr state_source();
  /// Bytes of optimizer state on this rank.
  std::size_t state_bytes() const;

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

using sharded::ZeroOptions;

}  // namespace torchspan
