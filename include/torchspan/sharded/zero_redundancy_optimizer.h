#pragma once
#include <memory>
#include <vector>

#include <torchspan/data_parallel/distributed_data_parallel.h>
#include <torchspan/optim/optimizer.h>
#include <torchspan/state/source.h>

namespace torchspan {
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
