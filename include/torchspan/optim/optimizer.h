#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/optim/functional.h>
#include <torchspan/state/source.h>
#include <torchspan/wire.h>

namespace torch::nn {
class Module;
}

namespace torchspan::optim {

using state::StateDict;

/// An object with one learning rate per group, driven by an LRScheduler. NaN marks an optimizer without a
/// rate.
class LRTarget {
 public:
  virtual ~LRTarget() = default;
  virtual std::vector<double> lrs() const = 0;
  /// Sets one rate per group; NaN leaves a group's rate unchanged.
  virtual void set_lrs(const std::vector<double>& rates) = 0;
};

/// Parameters that share one optimizer spec. Their names appear in errors and in the state; without names
/// their indices do.
struct ParamGroup {
  ParamGroup(std::vector<at::Tensor> parameters, OptimizerSpec spec, std::vector<std::string> names = {});
  /// All parameters of a module, each once, with the module's names.
  ParamGroup(const torch::nn::Module& module, OptimizerSpec spec);

  std::vector<at::Tensor> parameters;
  OptimizerSpec spec;
  std::vector<std::string> names;
  std::string label;     ///< group's name in the state; empty: its index
  bool hogwild = false;  ///< see DistributedParamGroup
};

class Optimizer;

/// Result of Optimizer::step_in_backward(): stepping in backward ends when it is destroyed.
class [[nodiscard]] BackwardSteps {
 public:
  explicit BackwardSteps(Optimizer& optimizer);
  ~BackwardSteps();
  BackwardSteps(BackwardSteps&&) noexcept;
  BackwardSteps& operator=(BackwardSteps&&) noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Trains local parameters from their `.grad`, in groups with separate options. Not thread-safe.
class Optimizer : public LRTarget {
 public:
  using GradientOf = std::function<at::Tensor(const at::Tensor& parameter)>;

  Optimizer(std::vector<at::Tensor> parameters, OptimizerSpec spec);
  Optimizer(const torch::nn::Module& module, OptimizerSpec spec);
  /// Builds the specs with `table`, if given. Throws Error{kInvalid} for an empty list of groups, a
  /// parameter in two groups or duplicate names, and what the specs' optimizers throw.
  explicit Optimizer(std::vector<ParamGroup> groups, const OptimizerTable* table = nullptr);

  /// Updates every parameter that has a gradient. All gradients of all groups are checked before anything
  /// changes. Throws as FunctionalOptimizer::step().
  void step();
  /// Updates parameters with the given gradients instead of `.grad`; undefined ones are skipped.
  void step(const GradientOf& gradient_of);
  /// Updates one of the parameters. Throws Error{kInvalid} for any other tensor.
  void step_one(const at::Tensor& parameter, const at::Tensor& gradient);
  /// Steps each parameter in backward() as soon as its gradient is final and then clears its `.grad`, while
  /// the result lives. Every pass is one step; clip_grad_norm() and GradScaler throw meanwhile. This
  /// object must outlive the result, and the result must not be destroyed during a pass. Throws Error{kInvalid}
  /// for a parameter that DistributedDataParallel averages.
  BackwardSteps step_in_backward() { return BackwardSteps(*this); }
  /// Resets every `.grad`, to undefined or to zeros.
  void zero_grad(bool set_to_none = true);
  /// Scales all `.grad` in place as clip_grad_norm() does; returns the norm before scaling.
  double clip_grad_norm(double max_norm, double norm_type = 2);

  std::size_t group_count() const { return groups_.size(); }
  double lr(std::size_t group = 0) const;
  /// Sets the rate of all groups or of one. Throws Error{kInvalid} for a rate that the optimizer rejects.
  void set_lr(double lr);
  void set_lr(std::size_t group, double lr);
  std::vector<double> lrs() const override;
  void set_lrs(const std::vector<double>& rates) override;

  /// The state, for checkpoints: what belongs to the elements of a parameter is saved as boxes where the parameter is.
  /// Holds a reference.
  state::SourcePtr state_source();
  /// A copy of all state, with the groups' kinds and rates.
  StateDict state_dict() const;
  /// The same without copies: later steps change its tensors.
  StateDict state_view() const;
  /// Loads a state saved by an optimizer with the same groups, names, kinds and options. Throws
  /// Error{kInvalid} naming the parameter that is missing, unknown or mismatched, and then changes nothing.
  void load_state_dict(const StateDict& state);

  std::vector<at::Tensor> parameters() const;
  /// With what the names of a parameter's entries in the state begin, one for each of parameters().
  std::vector<std::string> state_names() const;
  /// "group.0.parameter.weight"; `label`: of the group.
  static std::string state_name(const std::string& label, const std::string& parameter);
  /// A parameter's name in errors.
  std::string describe(const at::Tensor& parameter) const;
  const FunctionalOptimizer& rule(std::size_t group) const { return *groups_.at(group).rule; }

 private:
  struct Part {
    std::unique_ptr<FunctionalOptimizer> rule;
    std::string label;
    std::vector<std::string> names;
  };
  void add(ParamGroup group, const OptimizerTable* table);

  std::vector<Part> groups_;
  std::unordered_map<const c10::TensorImpl*, std::pair<std::size_t, std::size_t>> places_;  ///< group, index
};

/// Norm of all gradients as one vector, of type 1, 2, …, or infinity. Undefined gradients are skipped.
/// Throws Error{kInvalid} unless the type is > 0.
double gradient_norm(const std::vector<at::Tensor>& gradients, double norm_type = 2);
/// Factor that scales gradients with this norm to at most `max_norm`: 1, or max_norm / (norm + 1e-6) as in
/// LibTorch. Throws Error{kInvalid} unless max_norm is > 0.
double clip_factor(double norm, double max_norm);
/// Scales the parameters' `.grad` in place to a total norm of at most `max_norm`; returns the norm before
/// scaling. The gradient of a parameter that is listed several times counts once.
double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2);

}  // namespace torchspan::optim

namespace torchspan {
using optim::clip_grad_norm;
}  // namespace torchspan

/// Encoded as a list of names and tensors.
template <>
struct torchspan::Wire<torchspan::optim::StateDict> {
  static std::string name() { return "optim.StateDict"; }
  static void encode(wire::Encoder& encoder, const optim::StateDict& value);
  static optim::StateDict decode(wire::Decoder& decoder);
};
