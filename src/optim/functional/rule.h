#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/optim/functional.h>

#include "optim/functional/fused_steps.h"
#include "optim/functional/operands.h"

namespace torchspan::optim {

/// Settings that RuleOptimizer needs besides the rule.
struct RuleSettings {
  std::vector<std::string> slots;  ///< names of the state tensors that a parameter has
  std::optional<bool> foreach = std::nullopt;
  bool float32_state = false;
  bool master_weights = false;
  bool cpu_kernel = false;  ///< the rule updates a parameter on the CPU in one pass over memory
};

/// Base of an optimizer with an update rule: keeps the state, converts operands to real numbers of the right
/// precision, chooses between one parameter at a time, many at once and LibTorch's fused operators, and increments
/// each version counter by one.
class RuleOptimizer : public FunctionalOptimizer {
 public:
  RuleOptimizer(std::string_view name, RuleSettings settings, std::vector<at::Tensor> parameters);
  ParameterState state(std::size_t index) const override;
  void load_state(std::size_t index, const ParameterState& state) override;
  void set_hogwild(bool on) override { hogwild_ = on; }

 protected:
  /// The initial value of a slot; zeros by default.
  virtual at::Tensor make_slot(std::size_t slot, const at::Tensor& like) const;
  virtual void apply(const Operands<at::Tensor>& on) const = 0;
  virtual void apply(const Operands<Tensors>& on) const = 0;
  /// Whether LibTorch has a fused operator for this rule on the device of `like`.
  virtual bool has_operator_for(const at::Tensor& /*like*/) const { return false; }
  /// Applies the rule by that operator; returns false, and changes nothing, if it cannot.
  virtual bool apply_by_operator(const Operands<Tensors>& /*on*/) const { return false; }
  /// Called for a sparse gradient, and for every gradient if the state is sparse.
  virtual void apply_sparse(const Operands<at::Tensor>& on) const;
  virtual std::string refuse_sparse_rule() const = 0;
  std::string refuse_sparse(const at::Tensor& parameter) const final;

 private:
  struct State {
    std::int64_t steps = 0;
    Tensors slots;
    at::Tensor master;  ///< float32 copy of the parameter, if the optimizer keeps one
    bool sparse() const;
    bool has_slots() const;
  };
  /// A parameter and its gradient as the rule gets them.
  struct Views {
    at::Tensor parameter, gradient;
  };
  void update(std::size_t index, at::Tensor& parameter, const at::Tensor& gradient) override;
  void update_all(std::span<const at::Tensor> gradients) override;
  void update_many(const std::vector<std::size_t>& indices, std::span<const at::Tensor> gradients,
                   bool by_operator);
  bool in_float32(const at::Tensor& parameter) const;
  bool has_master(const at::Tensor& parameter) const;
  bool can_update_together(std::size_t index, const at::Tensor& gradient) const;
  bool can_use_operator(std::size_t index) const;
  Views views(const at::Tensor& parameter, const at::Tensor& gradient, State& state) const;
  void begin(State& state, const at::Tensor& like) const;
  void finish(at::Tensor& parameter, const at::Tensor& seen) const;
  /// Runs the rule; what LibTorch says of a dtype gets the name of the parameter, and the options to use.
  template <class Rule>
  void explained(std::size_t index, const Rule& rule) const;

  const RuleSettings settings_;
  bool hogwild_ = false;
  std::vector<State> states_;
};

/// A rule that also exists as a kernel: fused(operands) returns a step of fused_kernels.h.
template <class R>
concept FusedRule = requires(const R& rule, const Operands<at::Tensor>& on) {
  rule.fused(on);
};

/// RuleOptimizer for the options struct `Options`: `Derived` has a template run(const Operands<T>&) const and
/// refuse_sparse_rule(), and may be a FusedRule.
template <class Options, class Derived>
class Rule : public RuleOptimizer {
 public:
  Rule(const Options& options, std::vector<std::string> slots, std::vector<at::Tensor> parameters)
      : RuleOptimizer(Options::kName, settings(options, std::move(slots)), std::move(parameters)),
        options_(options) {}
  double lr() const override { return options_.lr; }
  void set_lr(double lr) override {
    check_not_negative(Options::kName, "lr", lr);
    options_.lr = lr;
  }

 protected:
  void apply(const Operands<at::Tensor>& on) const override {
    const auto& rule = static_cast<const Derived&>(*this);
    if constexpr (FusedRule<Derived>) {
      if (fused_step(rule.fused(on), on)) return;
    }
    rule.run(on);
  }
  void apply(const Operands<Tensors>& on) const override { static_cast<const Derived&>(*this).run(on); }
  bool has_operator_for(const at::Tensor& like) const override { return has_fused_operator(options_, like); }
  bool apply_by_operator(const Operands<Tensors>& on) const override {
    return run_fused_operator(options_, on);
  }

  Options options_;

 private:
  static RuleSettings settings(const Options& options, std::vector<std::string> slots) {
    RuleSettings settings{.slots = std::move(slots),
                          .float32_state = options.float32_state,
                          .master_weights = options.master_weights,
                          .cpu_kernel = FusedRule<Derived>};
    if constexpr (requires { options.foreach; }) settings.foreach = options.foreach;
    return settings;
  }
};

/// The gradient with sign and weight decay applied, as most rules need it. Copies only if something changes.
template <class T>
T descent(const Operands<T>& on, bool maximize, double weight_decay) {
  if (!maximize && weight_decay == 0) return on.gradient;
  T direction = maximize ? math::neg(on.gradient) : on.gradient;
  return weight_decay == 0 ? direction : math::add(direction, on.parameter, weight_decay);
}

/// A sparse tensor with `values` at the entries of `like`, which is coalesced.
at::Tensor with_values(const at::Tensor& like, const at::Tensor& values);

/// Why an optimizer that changes all elements at every step rejects a sparse gradient.
std::string refusal_of_sparse(std::string_view instead);
/// Why weight decay, which makes a sparse gradient dense, rejects it; empty without weight decay.
std::string refusal_of_decay(double weight_decay);

}  // namespace torchspan::optim
