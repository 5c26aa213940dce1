#pragma once
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/autograd/context.h>
#include <torchspan/optim/adadelta.h>
#include <torchspan/optim/adagrad.h>
#include <torchspan/optim/adam.h>
#include <torchspan/optim/adamax.h>
#include <torchspan/optim/adamw.h>
#include <torchspan/optim/lr_scheduler.h>
#include <torchspan/optim/optimizer.h>
#include <torchspan/optim/rmsprop.h>
#include <torchspan/optim/rprop.h>
#include <torchspan/optim/sgd.h>
#include <torchspan/optim/sparse_adam.h>
#include <torchspan/rpc/worker.h>

namespace torch::nn {
class Module;
}

namespace torchspan::optim {

/// What an optimizer trains: an RRef to a module or a tensor, a module of this process, or a tensor of this
/// process. The parameters of a module are listed where it lives, when the optimizer is made.
class Target {
 public:
  template <class T>
  Target(const RRef<T>& rref) : reference_(rref.state()) {}
  Target(const at::Tensor& tensor) : tensors_{tensor} {}
  Target(const std::shared_ptr<torch::nn::Module>& module);
  template <class Holder>
  requires requires { typename Holder::ContainedType; }
  Target(const Holder& module) : Target(std::shared_ptr<torch::nn::Module>(module.ptr())) {}

  /// Null for what lives in this process.
  const rpc::ReferencePtr& reference() const { return reference_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  /// Of the tensors of a module of this process.
  const std::vector<std::string>& names() const { return names_; }

 private:
  rpc::ReferencePtr reference_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::string> names_;
};

/// Targets that are trained with the same options. `hogwild` is for trainers that step the same parameters in
/// their own time: a pass whose forward saw older values than its backward goes on with the newer ones, where
/// otherwise it fails (Niu and others, Hogwild!, NIPS 2011). Every trainer must say it.
struct DistributedParamGroup {
  std::vector<Target> targets;
  OptimizerSpec spec;
  bool hogwild = false;
};

/// How gradients are clipped. Where DistributedDataParallel averages the gradients of some of the parameters,
/// and others, of an embedding elsewhere say, have gradients of each trainer's own, the trainers' norms
/// differ, and copies that each scaled by its own would drift apart: then `replicas` must name them.
struct ClipOptions {
  double max_norm = 0;  ///< must be given
  double norm_type = 2;
  /// Ranks of the workers that train replicas of one model, this one among them (of a group: group.ranks()).
  /// All of them clip at the same time with the same options, and scale by the largest of their norms.
  std::vector<int> replicas = {};
  Duration timeout = std::chrono::minutes(5);  ///< how long a replica waits for the others
};

/// Steps parameters where they live, with the gradients of a distributed autograd context: one
/// optimizer on every owner, made from the same specs. One thread at a time; several of them, on any workers,
/// may share parameters (see OptimExtension). In the state, parameters are called by their target's index in
/// its group, and by their name in its module: "group.0.parameter.2.layer.weight.exp_avg". So a state can be
/// loaded where the targets are the same, wherever they live now.
class DistributedOptimizer : public LRTarget {
 public:
  /// Makes the optimizers on all owners. Throws one Error that lists every owner's failure: an option that is
  /// wrong, a target without parameters, a parameter that is no leaf or is named twice.
  DistributedOptimizer(const Worker& worker, OptimizerSpec spec, std::vector<Target> targets)
      : DistributedOptimizer(worker, {DistributedParamGroup{std::move(targets), std::move(spec)}}) {}
  DistributedOptimizer(const Worker& worker, const std::vector<DistributedParamGroup>& groups);
  /// From whatever has a worker(): a Session.
  template <class S>
  requires requires(S& session) { session.worker(); }
  DistributedOptimizer(S& session, OptimizerSpec spec, std::vector<Target> targets)
      : DistributedOptimizer(session.worker(), std::move(spec), std::move(targets)) {}
  template <class S>
  requires requires(S& session) { session.worker(); }
  DistributedOptimizer(S& session, const std::vector<DistributedParamGroup>& groups)
      : DistributedOptimizer(session.worker(), groups) {}
  /// The optimizers on the owners end too; those of a worker that died or left end by themselves.
  ~DistributedOptimizer() override;
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  /// Updates every parameter that has a gradient in `context`, on all owners in parallel, and returns when
  /// all are done. The others keep their values and state. Throws one Error that lists every owner's failure;
  /// the other owners have then stepped. Throws Error{kInvalid} when no pass was heard of in `context`,
  /// neither here nor on an owner.
  void step(const autograd::ContextView& context);
  /// From now on, passes of `context` step each parameter on its owner as soon as they are done with its
  /// gradient, which is then gone: the gradients of all parameters are never held at once. To be called
  /// before backward(), which returns after the steps and throws what they throw; after it has thrown, none
  /// begins. Not together with clip_grad_norm(), nor for parameters that DistributedDataParallel averages.
  void step_in_backward(const autograd::ContextView& context);
  /// The norm of all gradients in `context`, asked of all owners at once. If it is above `max_norm`, the next
  /// step() with this context scales the gradients as it uses them; those in the context stay as they are.
  /// Further passes in the context after this call are scaled by the same factor. Throws Error{kInvalid}
  /// naming two parameters where the replicas have to agree (ClipOptions).
  double clip_grad_norm(const autograd::ContextView& context, double max_norm, double norm_type = 2);
  /// The same; returns the norm that all replicas scale by. A replica that fails meanwhile fails all of them.
  double clip_grad_norm(const autograd::ContextView& context, const ClipOptions& options);

  std::size_t group_count() const { return rates_.size(); }
  double lr(std::size_t group = 0) const { return rates_.at(group); }
  /// Of all groups, or of one, on all owners from the next step on; costs no message. Throws Error{kInvalid}
  /// for a rate that is not a number from 0 up.
  void set_lr(double lr);
  void set_lr(std::size_t group, double lr);
  std::vector<double> lrs() const override { return rates_; }
  void set_lrs(const std::vector<double>& rates) override;

  /// A copy of all owners' state, fetched at once.
  StateDict state_dict();
  /// Gives every owner its part of a state. Throws Error{kInvalid} naming what is unknown before anything is
  /// sent, and one Error that lists every owner's failure: those keep their state, the others have the new
  /// one.
  void load_state_dict(const StateDict& state);
  /// The same, each part as a value on its owner, in the order of the owners: nothing large travels.
  std::vector<RRef<StateDict>> state_shards();
  void load_state_shards(const std::vector<RRef<StateDict>>& shards);

 private:
  /// What one owner has: its optimizer's id, and which of the groups.
  struct Share {
    std::uint64_t id = 0;
    std::vector<std::size_t> groups;
  };
  /// Ends the optimizers on the owners, without waiting for it.
  void drop() noexcept;
  double norm_here(const autograd::ContextView& context, const ClipOptions& options) const;
  GlobalId id_on(std::uint32_t owner) const { return {worker_.rank(), shares_.at(owner).id}; }
  std::vector<double> rates_on(std::uint32_t owner) const;
  std::map<std::uint32_t, StateDict> split(const StateDict& state) const;

  const Worker worker_;
  std::map<std::uint32_t, Share> shares_;           ///< by owner
  std::vector<std::vector<std::uint32_t>> owners_;  ///< of each group's targets
  std::vector<std::string> kinds_;
  std::vector<double> rates_;
  std::optional<std::pair<std::uint64_t, double>> clip_;  ///< a context, and the scale of its next step
};

}  // namespace torchspan::optim
