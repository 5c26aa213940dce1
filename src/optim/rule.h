#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/optim/functional.h>

#include "optim/tensors.h"

namespace torchspan::optim {

/// What a rule works on: one parameter, or (T = Tensors) several on one device that have had equally many
/// steps. Complex ones come as pairs of reals.
template <class T>
struct Operands {
  T& parameter;       ///< to update in place
  const T& gradient;  ///< to read
  T* state;           ///< the slots, in the order of their names
  double steps;       ///< the parameter's own steps, this one included
};

/// What the optimizers of this library have in common besides the rule.
struct Manner {
  std::vector<std::string> slots;  ///< names of the state tensors that a parameter has
  std::optional<bool> foreach = std::nullopt;
  bool float32_state = false;
};

/// The frame around an update rule: keeps the state, gives the rule real numbers of the right precision,
/// chooses between one parameter at a time and many at once, and advances each version counter by one.
class RuleOptimizer : public FunctionalOptimizer {
 public:
  RuleOptimizer(std::string_view name, Manner manner, std::vector<at::Tensor> parameters);
  ParameterState state(std::size_t index) const override;
  void load_state(std::size_t index, const ParameterState& state) override;
  void set_hogwild(bool on) override { hogwild_ = on; }

 protected:
  /// A slot before the first step; zeros, unless the rule makes something else of it.
  virtual at::Tensor make_slot(std::size_t slot, const at::Tensor& like) const;
  virtual void apply(const Operands<at::Tensor>& on) const = 0;
  virtual void apply(const Operands<Tensors>& on) const = 0;
  /// For a sparse gradient, and for any gradient once there is sparse state.
  virtual void apply_sparse(const Operands<at::Tensor>& on) const;
  virtual std::string refuse_sparse_rule() const = 0;
  std::string refuse_sparse(const at::Tensor& parameter) const final;

 private:
  struct State {
    std::int64_t steps = 0;
    Tensors slots;
    bool sparse() const;
  };
  /// A parameter as the rule sees it, and its gradient.
  struct Views {
    at::Tensor parameter, gradient;
  };
  void update(std::size_t index, at::Tensor& parameter, const at::Tensor& gradient) override;
  void update_all(std::span<const at::Tensor> gradients) override;
  void update_many(const std::vector<std::size_t>& indices, std::span<const at::Tensor> gradients);
  bool in_float32(const at::Tensor& parameter) const;
  bool goes_with_others(std::size_t index, const at::Tensor& gradient) const;
  Views views(const at::Tensor& parameter, const at::Tensor& gradient) const;
  void begin(State& state, const at::Tensor& like) const;
  void finish(at::Tensor& parameter, const at::Tensor& seen) const;

  const Manner manner_;
  bool hogwild_ = false;
  std::vector<State> states_;
};

/// RuleOptimizer for the options struct `Options`: `Derived` has a template run(const Operands<T>&) const and
/// refuse_sparse_rule().
template <class Options, class Derived>
class Rule : public RuleOptimizer {
 public:
  Rule(const Options& options, std::vector<std::string> slots, std::vector<at::Tensor> parameters)
      : RuleOptimizer(Options::kName, {std::move(slots), options.foreach, options.float32_state},
                      std::move(parameters)),
        options_(options) {}
  double lr() const override { return options_.lr; }
  void set_lr(double lr) override {
    check_not_negative(Options::kName, "lr", lr);
    options_.lr = lr;
  }

 protected:
  void apply(const Operands<at::Tensor>& on) const override { static_cast<const Derived*>(this)->run(on); }
  void apply(const Operands<Tensors>& on) const override { static_cast<const Derived*>(this)->run(on); }

  Options options_;
};

/// The gradient with the signs and the decay that most rules begin with; a copy only if it must be.
template <class T>
T descent(const Operands<T>& on, bool maximize, double weight_decay) {
  if (!maximize && weight_decay == 0) return on.gradient;
  T direction = maximize ? math::neg(on.gradient) : on.gradient;
  return weight_decay == 0 ? direction : math::add(direction, on.parameter, weight_decay);
}

/// A sparse tensor with other values at the entries of `like`, which is coalesced.
at::Tensor with_values(const at::Tensor& like, const at::Tensor& values);

/// What to say of a sparse gradient to an optimizer that moves all elements at every step.
std::string refusal_of_sparse(std::string_view instead);
/// What to say of one that weight decay would make dense; empty without weight decay.
std::string refusal_of_decay(double weight_decay);

}  // namespace torchspan::optim
