#pragma once
// DistributedOptimizer: one optimizer for parameters on many workers, after a distributed backward pass. Includes no
// torch/nn.
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/autograd.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/optimizer.h>
#include <torchspan/rpc/worker.h>

namespace torch::nn {
class Module;
}

namespace torchspan::optim {

/// What an optimizer trains: an RRef to a module or a tensor, a local module, or a local tensor. The
/// parameters of a module are listed on its owner when the optimizer is created.
class Target {
 public:
  template <class T>
  Target(const RRef<T>& rref) : reference_(rref.state()) {}
  Target(const at::Tensor& tensor) : tensors_{tensor} {}
  Target(const std::shared_ptr<torch::nn::Module>& module);
  template <class Holder>
  requires requires { typename Holder::ContainedType; }
  Target(const Holder& module) : Target(std::shared_ptr<torch::nn::Module>(module.ptr())) {}

  /// Null for a local target.
  const rpc::ReferencePtr& reference() const { return reference_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  /// Parameter names of a local module.
  const std::vector<std::string>& names() const { return names_; }

 private:
  rpc::ReferencePtr reference_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::string> names_;
};

/// Targets that share one optimizer spec. `hogwild` allows trainers to step the same parameters without
/// synchronization: a pass whose backward sees newer values than its forward continues instead of failing
/// (Niu et al., Hogwild!, NIPS 2011). Every trainer must set it.
struct DistributedParamGroup {
  std::vector<Target> targets;
  OptimizerSpec spec;
  bool hogwild = false;
};

/// How gradients are clipped. If DistributedDataParallel averages some gradients while others (say, of a
/// remote embedding) belong to one trainer, the trainers' norms differ, and replicas scaled by different
/// norms drift apart. Then `replicas` must list them.
struct ClipOptions {
  double max_norm = 0;  ///< required
  double norm_type = 2;
  /// Ranks of the workers that train replicas of one model, this one included (for a group: group.ranks()).
  /// All of them clip at the same time with the same options and scale by the largest of their norms.
  std::vector<int> replicas = {};
  Duration timeout = std::chrono::minutes(5);  ///< limit of a replica's wait for the others; 0: none
};

/// Steps parameters on their owners with the gradients of a distributed autograd context: one optimizer per
/// owner, built from the same specs. Not thread-safe. Several optimizers, on any workers, may share
/// parameters (see OptimExtension). The state names a parameter by its target's index in the group and its
/// name in the module ("group.0.parameter.2.layer.weight.exp_avg"), so a state can be loaded after targets
/// move to other workers.
class DistributedOptimizer : public LRTarget {
 public:
  /// Creates the optimizers on all owners. Throws one Error that lists every owner's failure: a wrong
  /// option, a target without parameters, a parameter that is not a leaf or is listed twice.
  DistributedOptimizer(const Worker& worker, OptimizerSpec spec, std::vector<Target> targets)
      : DistributedOptimizer(worker, {DistributedParamGroup{std::move(targets), std::move(spec)}}) {}
  DistributedOptimizer(const Worker& worker, const std::vector<DistributedParamGroup>& groups);
  /// Destroys the optimizers on the owners. Those of a worker that died or left are destroyed
  /// automatically.
  ~DistributedOptimizer() override;
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  /// Updates every parameter that has a gradient in `context`, on all owners in parallel, and returns when
  /// all are done. Other parameters keep their value and state. Throws one Error that lists every owner's
  /// failure; the remaining owners have stepped. Throws Error{kInvalid} if no backward pass ran in
  /// `context` on this worker or on an owner.
  void step(const autograd::ContextView& context);
  /// Steps each parameter on its owner during later passes of `context`, as soon as its gradient is final,
  /// and then frees the gradient. Call it before backward(), which returns after the steps and throws their
  /// errors; after a throw no further step begins. Cannot be combined with clip_grad_norm() or with
  /// parameters that DistributedDataParallel averages.
  void step_in_backward(const autograd::ContextView& context);
  /// Returns the norm of all gradients in `context`, over all owners. If it exceeds `max_norm`, the next
  /// step() with this context uses scaled gradients; those in the context are unchanged. Gradients of later
  /// passes in the context are scaled by the same factor. Throws Error{kInvalid} naming two parameters if
  /// replicas must be listed (ClipOptions).
  double clip_grad_norm(const autograd::ContextView& context, double max_norm, double norm_type = 2);
  /// Returns the norm that all replicas scale by. A replica that fails makes the call fail on all of them.
  double clip_grad_norm(const autograd::ContextView& context, const ClipOptions& options);
  /// Sets the factor of the gradients that the next step() with this context uses; those in the context are
  /// unchanged. A later clip_grad_norm() measures the scaled gradients. Returns whether the gradients are
  /// finite, on all owners and on all replicas (see ClipOptions::replicas). Used by GradScaler.
  bool scale_gradients(const autograd::ContextView& context, double factor,
                       const std::vector<int>& replicas = {});

  std::size_t group_count() const { return rates_.size(); }
  double lr(std::size_t group = 0) const { return rates_.at(group); }
  /// Sets the rate of all groups or of one, on all owners. Takes effect at the next step(); costs no extra
  /// message. Throws Error{kInvalid} for a rate that is negative or not a number.
  void set_lr(double lr);
  void set_lr(std::size_t group, double lr);
  std::vector<double> lrs() const override { return rates_; }
  void set_lrs(const std::vector<double>& rates) override;

  /// The state, for checkpoints: written by the owners of the parameters, and sent to them on restoring. Holds a
  /// reference.
  state::SourcePtr state_source();
  /// Fetches a copy of all owners' state, in parallel.
  StateDict state_dict();
  /// Sends every owner its part of a state. Throws Error{kInvalid} that names unknown entries before
  /// sending anything, and one Error that lists every owner's failure; those owners keep their state, the
  /// others have the new one.
  void load_state_dict(const StateDict& state);
  /// RRefs to the owners' state, in the order of the owners; tensors stay on their owners.
  std::vector<RRef<StateDict>> state_shards();
  void load_state_shards(const std::vector<RRef<StateDict>>& shards);

 private:
  /// What was asked for the gradients of one context.
  struct ContextUse {
    double factor = 1;  ///< the next step() multiplies them by it
    bool steps_in_backward = false;
  };
  /// One owner's optimizer id and the groups it has.
  struct Share {
    std::uint64_t id = 0;
    std::vector<std::size_t> groups;
  };
  /// Forgets contexts that have ended. Throws Error{kInvalid} if this one has; `verb` is named.
  ContextUse& use_of(const autograd::ContextView& context, const char* verb);
  /// Destroys the optimizers on the owners without waiting.
  void drop() noexcept;
  /// Norm of the gradients in the context, over all owners and replicas; `verb` is named in errors.
  double norm_of(const autograd::ContextView& context, const ClipOptions& options, const char* verb);
  GlobalId id_on(std::uint32_t owner) const {
    return {static_cast<std::uint32_t>(worker_.rank()), shares_.at(owner).id};
  }
  std::vector<double> rates_on(std::uint32_t owner) const;
  std::map<std::uint32_t, StateDict> split(const StateDict& state) const;

  const Worker worker_;
  std::map<std::uint32_t, Share> shares_;           ///< by owner
  std::vector<std::vector<std::uint32_t>> owners_;  ///< owners of each group's targets
  std::vector<std::string> kinds_;
  std::vector<double> rates_;
  std::map<std::uint64_t, ContextUse> uses_;  ///< by context
};

}  // namespace torchspan::optim

namespace torchspan {
using optim::ClipOptions;
using optim::DistributedOptimizer;
using optim::DistributedParamGroup;
}  // namespace torchspan
