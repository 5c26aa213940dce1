#pragma once
// Optimizer for the parameters of this process, and learning-rate schedules. Includes no torch/nn.
#include <cstddef>
#include <cstdint>
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

/// The factor of the base rate at a step, counted from 0. Any function of the step works.
using LRLambda = std::function<double(std::int64_t step)>;

/// gamma^floor(step / step_size). Like the other schedules here, it throws Error{kInvalid} naming a wrong
/// option when it is converted to an LRLambda.
struct StepLR {
  std::int64_t step_size = 0;  ///< required
  double gamma = 0.1;
  operator LRLambda() const;
};

/// Half a cosine wave from 1 to `eta_min_factor`, then constant (Loshchilov and Hutter, ICLR 2017).
struct CosineAnnealingLR {
  std::int64_t t_max = 0;     ///< steps until the minimum; required
  double eta_min_factor = 0;  ///< minimum, as a factor of the base rate
  operator LRLambda() const;
};

/// Linear warmup from `start_factor` to 1, then another schedule.
struct WarmupLR {
  std::int64_t total_iters = 0;  ///< steps before `then`, which counts its steps from there; required
  double start_factor = 0;
  LRLambda then = nullptr;  ///< empty: constant 1
  operator LRLambda() const;
};

/// Half a wave from 1 / div_factor up to 1, half a wave down to 1 / (div_factor * final_div_factor), then
/// constant (Smith and Topin, arXiv 1708.07120). The base rate is the maximum.
struct OneCycleLR {
  std::int64_t total_steps = 0;  ///< at least 2; required
  double pct_start = 0.3;        ///< fraction of the steps with a rising rate
  double div_factor = 25;
  double final_div_factor = 1e4;
  operator LRLambda() const;
};

/// Sets each group's rate to its base rate times the schedule's factor, locally or on all owners. The base
/// rate is the group's rate when the scheduler is created. Holds a reference: the optimizer must outlive
/// it.
class LRScheduler {
 public:
  /// Sets the rates of step 0. Throws Error{kInvalid} for an empty schedule.
  LRScheduler(LRTarget& optimizer, const LRLambda& schedule);
  /// One schedule per group.
  LRScheduler(LRTarget& optimizer, std::vector<LRLambda> schedules);

  /// Advances to the next step; call it after each optimizer step.
  void step() { set_steps(steps_ + 1); }
  std::int64_t steps() const { return steps_; }
  /// Jumps to a step, for resuming training.
  void set_steps(std::int64_t steps);

  /// The step and the base rates.
  StateDict state_dict() const;
  /// Restores the step and base rates and sets the rates. Throws Error{kInvalid} if the number of groups
  /// differs.
  void load_state_dict(const StateDict& state);

 private:
  LRTarget& optimizer_;
  std::vector<LRLambda> schedules_;
  std::vector<double> base_;
  std::int64_t steps_ = 0;
};

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
