#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torchspan/optim/optimizer_spec.h>
#include <torchspan/optim/state_dict.h>

namespace torch::nn {
class Module;
}

namespace torchspan::optim {

/// What has learning rates, one a group: what an LRScheduler drives. Not a number stands for an optimizer
/// without a rate.
class LRTarget {
 public:
  virtual ~LRTarget() = default;
  virtual std::vector<double> lrs() const = 0;
  /// One rate for each group; one that is not a number leaves its group's as it is.
  virtual void set_lrs(const std::vector<double>& rates) = 0;
};

/// Parameters that are trained with the same options. Names stand in errors and in the state; without them
/// the parameters are called by their index.
struct ParamGroup {
  ParamGroup(std::vector<at::Tensor> parameters, OptimizerSpec spec, std::vector<std::string> names = {});
  /// All parameters of a module, each once, by the module's names.
  ParamGroup(const torch::nn::Module& module, OptimizerSpec spec);

  std::vector<at::Tensor> parameters;
  OptimizerSpec spec;
  std::vector<std::string> names;
  std::string label;     ///< the group's name in the state; its index if empty
  bool hogwild = false;  ///< see DistributedParamGroup
};

class Optimizer;

/// What Optimizer::step_in_backward() gives: the stepping ends with it.
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

/// Trains parameters of this process by their `.grad`, in groups with options of their own. One thread at a
/// time.
class Optimizer : public LRTarget {
 public:
  using GradientOf = std::function<at::Tensor(const at::Tensor& parameter)>;

  Optimizer(std::vector<at::Tensor> parameters, OptimizerSpec spec);
  Optimizer(const torch::nn::Module& module, OptimizerSpec spec);
  /// Recipes are built by `table` if there is one. Throws Error{kInvalid} for no groups, for a parameter that
  /// is in two groups, for names that are not one each, and what the specs' optimizers throw.
  explicit Optimizer(std::vector<ParamGroup> groups, const OptimizerTable* table = nullptr);

  /// Updates every parameter that has a gradient. All gradients of all groups are checked before anything
  /// changes; then throws what FunctionalOptimizer::step does.
  void step();
  /// The same with gradients from elsewhere; undefined ones are skipped.
  void step(const GradientOf& gradient_of);
  /// Updates one of the parameters. Throws Error{kInvalid} for a tensor that is none of them.
  void step_one(const at::Tensor& parameter, const at::Tensor& gradient);
  /// As long as the result lives, backward() steps each parameter as soon as it is done with its gradient,
  /// and takes `.grad` away: the gradients of all parameters are never held at once. Every pass is a step,
  /// and clip_grad_norm() finds nothing. This object must outlive the result, which is not to go while a pass
  /// runs. Throws Error{kInvalid} for a parameter that DistributedDataParallel averages.
  BackwardSteps step_in_backward() { return BackwardSteps(*this); }
  /// Takes every `.grad` away, or fills it with zeros.
  void zero_grad(bool set_to_none = true);
  /// Scales all `.grad` in place by clip_grad_norm() and returns their norm before that.
  double clip_grad_norm(double max_norm, double norm_type = 2);

  std::size_t group_count() const { return groups_.size(); }
  double lr(std::size_t group = 0) const;
  /// Of all groups, or of one. Throws Error{kInvalid} for a rate that the optimizer refuses.
  void set_lr(double lr);
  void set_lr(std::size_t group, double lr);
  std::vector<double> lrs() const override;
  void set_lrs(const std::vector<double>& rates) override;

  /// A copy of all state, with the groups' kinds and rates.
  StateDict state_dict() const;
  /// Takes over a state that an optimizer with the same groups, names, kinds and options gave. Throws
  /// Error{kInvalid} naming the parameter that is missing, unknown or does not fit, and then changes nothing.
  void load_state_dict(const StateDict& state);

  std::vector<at::Tensor> parameters() const;
  /// What errors call one of the parameters.
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

/// The norm of all these gradients as one vector: of type 1, 2, …, or infinity. Undefined ones count nothing.
/// Throws Error{kInvalid} for a type that is not above 0.
double gradient_norm(const std::vector<at::Tensor>& gradients, double norm_type = 2);
/// By what to scale gradients of this norm so that it is at most `max_norm`: 1, or max_norm / (norm + 1e-6)
/// as LibTorch has it. Throws Error{kInvalid} unless max_norm is above 0.
double clip_factor(double norm, double max_norm);
/// Scales the parameters' `.grad` in place so that their common norm is at most `max_norm`; returns the norm
/// before that.
double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2);

}  // namespace torchspan::optim
