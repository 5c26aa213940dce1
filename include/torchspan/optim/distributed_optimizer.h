#pragma once
#include <map>
#include <memory>
#include <vector>

#include <torchspan/autograd/context.h>
#include <torchspan/optim/adagrad.h>
#include <torchspan/optim/recipe.h>
#include <torchspan/optim/sgd.h>
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

 private:
  rpc::ReferencePtr reference_;
  std::vector<at::Tensor> tensors_;
};

/// Steps parameters where they live, with the gradients of a distributed autograd context: one functional
/// optimizer on every owner, made from the same recipe. One thread at a time; several of them, on any
/// workers, may share parameters (see Steps).
class DistributedOptimizer {
 public:
  /// Makes the optimizers on all owners. Throws one Error that lists every owner's failure: an option that is
  /// wrong, a target without parameters, a parameter that is no leaf.
  DistributedOptimizer(const Worker& worker, Recipe recipe, std::vector<Target> targets);
  /// From whatever has a worker(): a Session.
  template <class S>
  requires requires(S& session) { session.worker(); }
  DistributedOptimizer(S& session, Recipe recipe, std::vector<Target> targets)
      : DistributedOptimizer(session.worker(), std::move(recipe), std::move(targets)) {}
  /// The optimizers on the owners end too.
  ~DistributedOptimizer();
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  /// Updates every parameter that has a gradient in `context`, on all owners in parallel, and returns when
  /// all are done. The others keep their values and state. Throws one Error that lists every owner's failure;
  /// the other owners have then stepped.
  void step(const autograd::ContextView& context);

 private:
  /// Ends the optimizers on the owners, without waiting for it.
  void drop();
  void for_each_owner(const std::string& what, const std::function<Future<Unit>(std::uint32_t)>& request);

  const Worker worker_;
  std::map<std::uint32_t, std::uint64_t> optimizers_;  ///< owner -> id of its optimizer there
};

}  // namespace torchspan::optim
