#include <cmath>
#include <utility>

#include <torchspan/optim/algorithms.h>

#include "core/api/throw_invalid.h"
#include "optim/functional/rule.h"

namespace torchspan::optim {
namespace {

class SgdRule final : public Rule<SGD, SgdRule> {
 public:
  SgdRule(const SGD& options, std::vector<at::Tensor> parameters)
      : Rule(options,
             options.momentum == 0 ? std::vector<std::string>() : std::vector<std::string>{"momentum_buffer"},
             std::move(parameters)) {}

  template <class T>
  void run(const Operands<T>& on) const {
    T direction = descent(on, options_.maximize, options_.weight_decay);
    if (options_.momentum != 0) {
      T& buffer = on.state[0];
      if (math::missing(buffer)) {
        buffer = math::clone(direction);
      } else {
        math::mul_(buffer, options_.momentum);
        math::add_(buffer, direction, 1 - options_.dampening);
      }
      direction = options_.nesterov ? math::add(direction, buffer, options_.momentum) : buffer;
    }
    math::add_(on.parameter, direction, -options_.lr);
  }
  SgdStep fused(const Operands<at::Tensor>& on) const {
    const bool first = options_.momentum != 0 && math::missing(on.state[0]);
    return {.lr = options_.lr,
            .momentum = options_.momentum,
            .gradient_share = first ? 1 : 1 - options_.dampening,
            .weight_decay = options_.weight_decay,
            .nesterov = options_.nesterov,
            .maximize = options_.maximize};
  }

 private:
  at::Tensor make_slot(std::size_t, const at::Tensor&) const override { return {}; }
  std::string refuse_sparse_rule() const override { return refusal_of_decay(options_.weight_decay); }

  void apply_sparse(const Operands<at::Tensor>& on) const override {
    at::Tensor direction = options_.maximize ? on.gradient.neg() : on.gradient;
    // Also called for a dense gradient if the momentum is sparse; weight decay applies as usual.
    if (options_.weight_decay != 0) direction = direction.add(on.parameter, options_.weight_decay);
    if (options_.momentum != 0) {
      const at::Tensor& buffer = advance(on.state[0], direction);
      direction = options_.nesterov ? sum(direction, buffer, options_.momentum) : buffer;
    }
    on.parameter.add_(direction, -options_.lr);
  }

  const at::Tensor& advance(at::Tensor& buffer, const at::Tensor& direction) const {
    if (math::missing(buffer)) {
      buffer = direction.is_sparse() ? direction.coalesce().clone() : direction.clone();
    } else if (buffer.is_sparse()) {
      buffer = sum(buffer.mul_(options_.momentum), direction, 1 - options_.dampening);
    } else {
      buffer.mul_(options_.momentum).add_(direction, 1 - options_.dampening);
    }
    return buffer;
  }

  /// a + alpha * b, sparse only if both are.
  static at::Tensor sum(const at::Tensor& a, const at::Tensor& b, double alpha) {
    if (a.is_sparse() && !b.is_sparse()) return b.mul(alpha).add_(a);
    at::Tensor result = a.add(b, alpha);
    return result.is_sparse() ? result.coalesce() : result;
  }
};

}  // namespace

void SGD::validate() const {
  if (std::isnan(lr)) {
    throw_invalid("SGD needs a learning rate, as in SGD{.lr = 0.01}");
  }
  check_not_negative(kName, "lr", lr);
  check_not_negative(kName, "momentum", momentum);
  check_not_negative(kName, "weight_decay", weight_decay);
  if (!std::isfinite(dampening)) {
    throw_invalid("SGD: dampening = {}, but it must be a number", dampening);
  }
  if (nesterov && (momentum == 0 || dampening != 0)) {
    throw_invalid(
        "SGD: nesterov = true with momentum = {} and dampening = {}, but it needs a momentum above 0 and no "
        "dampening",
        momentum, dampening);
  }
}

std::unique_ptr<FunctionalOptimizer> SGD::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<SgdRule>(*this, std::move(parameters));
}

namespace {

/// The common part of Adam and AdamW: updates both moments, then the parameter. `Options` has beta1, beta2, eps,
/// amsgrad and lr; the slots are exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
template <class T, class Options>
void step_by_moments(const Operands<T>& on, const T& direction, const Options& options) {
  T& mean = on.state[0];
  T& square = on.state[1];
  math::mul_(mean, options.beta1);
  math::add_(mean, direction, 1 - options.beta1);
  math::mul_(square, options.beta2);
  math::addcmul_(square, direction, direction, 1 - options.beta2);
  if (options.amsgrad) math::maximum_(on.state[2], square);
  T scale = math::sqrt(on.state[options.amsgrad ? 2 : 1]);
  math::div_(scale, std::sqrt(1 - std::pow(options.beta2, on.steps)));
  math::add_(scale, options.eps);
  math::addcdiv_(on.parameter, mean, scale, -options.lr / (1 - std::pow(options.beta1, on.steps)));
}

/// step_by_moments() as a fused step. Adam adds `weight_decay` to the gradient; AdamW decays the parameter by
/// `parameter_factor`.
template <class Options>
AdamStep fused_step_by_moments(const Options& options, double steps, double weight_decay,
                               double parameter_factor) {
  return {.rate = options.lr / (1 - std::pow(options.beta1, steps)),
          .correction = std::sqrt(1 - std::pow(options.beta2, steps)),
          .beta1 = options.beta1,
          .beta2 = options.beta2,
          .eps = options.eps,
          .weight_decay = weight_decay,
          .parameter_factor = parameter_factor,
          .amsgrad = options.amsgrad,
          .maximize = options.maximize};
}

template <class Options>
std::vector<std::string> slots_of_moments(const Options& options) {
  std::vector<std::string> slots = {"exp_avg", "exp_avg_sq"};
  if (options.amsgrad) slots.push_back("max_exp_avg_sq");
  return slots;
}

/// Checks the options that Adam and AdamW share. Throws Error{kInvalid} naming the invalid one.
template <class Options>
void check_moments(const Options& options) {
  check_not_negative(Options::kName, "lr", options.lr);
  check_share(Options::kName, "beta1", options.beta1);
  check_share(Options::kName, "beta2", options.beta2);
  check_not_negative(Options::kName, "eps", options.eps);
}

class AdamRule final : public Rule<Adam, AdamRule> {
 public:
  AdamRule(const Adam& options, std::vector<at::Tensor> parameters)
      : Rule(options, slots_of_moments(options), std::move(parameters)) {}

  template <class T>
  void run(const Operands<T>& on) const {
    step_by_moments(on, descent(on, options_.maximize, options_.weight_decay), options_);
  }
  AdamStep fused(const Operands<at::Tensor>& on) const {
    return fused_step_by_moments(options_, on.steps, options_.weight_decay, 1);
  }

 private:
  std::string refuse_sparse_rule() const override { return refusal_of_sparse("SparseAdam"); }
};

}  // namespace

void Adam::validate() const {
  check_moments(*this);
  check_not_negative(kName, "weight_decay", weight_decay);
}

std::unique_ptr<FunctionalOptimizer> Adam::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<AdamRule>(*this, std::move(parameters));
}

namespace {

class AdamWRule final : public Rule<AdamW, AdamWRule> {
 public:
  AdamWRule(const AdamW& options, std::vector<at::Tensor> parameters)
      : Rule(options, slots_of_moments(options), std::move(parameters)) {}

  template <class T>
  void run(const Operands<T>& on) const {
    if (options_.weight_decay != 0) math::mul_(on.parameter, 1 - options_.lr * options_.weight_decay);
    step_by_moments(on, descent(on, options_.maximize, 0), options_);
  }
  AdamStep fused(const Operands<at::Tensor>& on) const {
    return fused_step_by_moments(options_, on.steps, 0, 1 - options_.lr * options_.weight_decay);
  }

 private:
  std::string refuse_sparse_rule() const override { return refusal_of_sparse("SparseAdam"); }
};

}  // namespace

void AdamW::validate() const {
  check_moments(*this);
  check_not_negative(kName, "weight_decay", weight_decay);
}

std::unique_ptr<FunctionalOptimizer> AdamW::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<AdamWRule>(*this, std::move(parameters));
}

namespace {

class SparseAdamRule final : public Rule<SparseAdam, SparseAdamRule> {
 public:
  SparseAdamRule(const SparseAdam& options, std::vector<at::Tensor> parameters)
      : Rule(options, {"exp_avg", "exp_avg_sq"}, std::move(parameters)) {}

  template <class T>
  void run(const Operands<T>&) const {}  // refuse_dense()

 private:
  std::string refuse_sparse_rule() const override { return {}; }
  std::string refuse_dense(const at::Tensor&) const override {
    return "but uses sparse ones only; make them sparse (an Embedding's sparse option), or use Adam for "
           "the parameter";
  }

  void apply_sparse(const Operands<at::Tensor>& on) const override {
    const at::Tensor direction = (options_.maximize ? on.gradient.neg() : on.gradient).coalesce();
    if (direction._nnz() == 0) return;
    const at::Tensor values = direction._values();
    const at::Tensor mean = advance(on.state[0], direction, values, options_.beta1);
    const at::Tensor square = advance(on.state[1], direction, values.square(), options_.beta2);
    const double rate = options_.lr * std::sqrt(1 - std::pow(options_.beta2, on.steps)) /
                        (1 - std::pow(options_.beta1, on.steps));
    on.parameter.add_(with_values(direction, mean.div(square.sqrt().add_(options_.eps)).mul_(-rate)));
  }

  /// Moves the entries of `moment` at the gradient's indices towards `values`, and returns them.
  static at::Tensor advance(at::Tensor& moment, const at::Tensor& gradient, const at::Tensor& values,
                            double beta) {
    const at::Tensor old = moment.sparse_mask(gradient)._values();
    at::Tensor change = values.sub(old).mul_(1 - beta);
    moment.add_(with_values(gradient, change));
    return change.add_(old);
  }
};

}  // namespace

void SparseAdam::validate() const {
  check_positive(kName, "lr", lr);
  check_share(kName, "beta1", beta1);
  check_share(kName, "beta2", beta2);
  check_positive(kName, "eps", eps);
}

std::unique_ptr<FunctionalOptimizer> SparseAdam::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<SparseAdamRule>(*this, std::move(parameters));
}

namespace {

class AdamaxRule final : public Rule<Adamax, AdamaxRule> {
 public:
  AdamaxRule(const Adamax& options, std::vector<at::Tensor> parameters)
      : Rule(options, {"exp_avg", "exp_inf"}, std::move(parameters)) {}

  template <class T>
  void run(const Operands<T>& on) const {
    T direction = descent(on, options_.maximize, options_.weight_decay);
    math::mul_(on.state[0], options_.beta1);
    math::add_(on.state[0], direction, 1 - options_.beta1);
    T& norm = on.state[1];
    math::mul_(norm, options_.beta2);
    math::for_each_tensor(
        [&](at::Tensor& largest, const at::Tensor& now) {
          math::maximum_(largest, now.abs().add_(options_.eps));
        },
        norm, direction);
    math::addcdiv_(on.parameter, on.state[0], norm, -options_.lr / (1 - std::pow(options_.beta1, on.steps)));
  }

 private:
  std::string refuse_sparse_rule() const override { return refusal_of_sparse("SparseAdam"); }
};

}  // namespace

void Adamax::validate() const {
  check_moments(*this);
  check_not_negative(kName, "weight_decay", weight_decay);
}

std::unique_ptr<FunctionalOptimizer> Adamax::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<AdamaxRule>(*this, std::move(parameters));
}

namespace {

class AdagradRule final : public Rule<Adagrad, AdagradRule> {
 public:
  AdagradRule(const Adagrad& options, std::vector<at::Tensor> parameters)
      : Rule(options, {"sum"}, std::move(parameters)) {}

  template <class T>
  void run(const Operands<T>& on) const {
    const T direction = descent(on, options_.maximize, options_.weight_decay);
    math::addcmul_(on.state[0], direction, direction, 1);
    T scale = math::sqrt(on.state[0]);
    math::add_(scale, options_.eps);
    math::addcdiv_(on.parameter, direction, scale, -rate(on.steps));
  }
  AdagradStep fused(const Operands<at::Tensor>& on) const {
    return {.rate = rate(on.steps),
            .eps = options_.eps,
            .weight_decay = options_.weight_decay,
            .maximize = options_.maximize};
  }

 private:
  double rate(double steps) const { return options_.lr / (1 + (steps - 1) * options_.lr_decay); }
  at::Tensor make_slot(std::size_t, const at::Tensor& like) const override {
    return at::full_like(like, options_.initial_accumulator_value);
  }
  std::string refuse_sparse_rule() const override { return refusal_of_decay(options_.weight_decay); }

  void apply_sparse(const Operands<at::Tensor>& on) const override {
    const at::Tensor direction = (options_.maximize ? on.gradient.neg() : on.gradient).coalesce();
    if (direction._nnz() == 0) return;
    const at::Tensor values = direction._values();
    on.state[0].add_(with_values(direction, values.square()));
    const at::Tensor scale = on.state[0].sparse_mask(direction)._values().sqrt_().add_(options_.eps);
    on.parameter.add_(with_values(direction, values / scale), -rate(on.steps));
  }
};

}  // namespace

void Adagrad::validate() const {
  check_not_negative(kName, "lr", lr);
  check_not_negative(kName, "lr_decay", lr_decay);
  check_not_negative(kName, "weight_decay", weight_decay);
  check_not_negative(kName, "initial_accumulator_value", initial_accumulator_value);
  check_not_negative(kName, "eps", eps);
}

std::unique_ptr<FunctionalOptimizer> Adagrad::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<AdagradRule>(*this, std::move(parameters));
}

namespace {

class AdadeltaRule final : public Rule<Adadelta, AdadeltaRule> {
 public:
  AdadeltaRule(const Adadelta& options, std::vector<at::Tensor> parameters)
      : Rule(options, {"square_avg", "acc_delta"}, std::move(parameters)) {}

  template <class T>
  void run(const Operands<T>& on) const {
    const T direction = descent(on, options_.maximize, options_.weight_decay);
    T& square = on.state[0];
    T& moved = on.state[1];
    math::mul_(square, options_.rho);
    math::addcmul_(square, direction, direction, 1 - options_.rho);
    T scale = math::add(square, options_.eps);
    math::sqrt_(scale);
    T delta = math::add(moved, options_.eps);
    math::sqrt_(delta);
    math::div_(delta, scale);
    math::mul_(delta, direction);
    math::mul_(moved, options_.rho);
    math::addcmul_(moved, delta, delta, 1 - options_.rho);
    math::add_(on.parameter, delta, -options_.lr);
  }

 private:
  std::string refuse_sparse_rule() const override { return refusal_of_sparse("SGD, Adagrad or SparseAdam"); }
};

}  // namespace

void Adadelta::validate() const {
  check_not_negative(kName, "lr", lr);
  if (!(rho >= 0 && rho <= 1)) {
    throw_invalid("Adadelta: rho = {}, but it must be a number from 0 to 1", rho);
  }
  check_not_negative(kName, "eps", eps);
  check_not_negative(kName, "weight_decay", weight_decay);
}

std::unique_ptr<FunctionalOptimizer> Adadelta::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<AdadeltaRule>(*this, std::move(parameters));
}

namespace {

class RmspropRule final : public Rule<RMSprop, RmspropRule> {
 public:
  RmspropRule(const RMSprop& options, std::vector<at::Tensor> parameters)
      : Rule(options, slots(options), std::move(parameters)) {}

  template <class T>
  void run(const Operands<T>& on) const {
    const T direction = descent(on, options_.maximize, options_.weight_decay);
    T& square = on.state[0];
    math::mul_(square, options_.alpha);
    math::addcmul_(square, direction, direction, 1 - options_.alpha);
    T scale = root(on, direction);
    math::add_(scale, options_.eps);
    if (options_.momentum == 0) {
      math::addcdiv_(on.parameter, direction, scale, -options_.lr);
      return;
    }
    T& buffer = on.state[1];
    math::mul_(buffer, options_.momentum);
    math::addcdiv_(buffer, direction, scale, 1);
    math::add_(on.parameter, buffer, -options_.lr);
  }
  RmspropStep fused(const Operands<at::Tensor>&) const {
    return {.lr = options_.lr,
            .alpha = options_.alpha,
            .eps = options_.eps,
            .weight_decay = options_.weight_decay,
            .momentum = options_.momentum,
            .centered = options_.centered,
            .maximize = options_.maximize};
  }

 private:
  static std::vector<std::string> slots(const RMSprop& options) {
    std::vector<std::string> names = {"square_avg"};
    if (options.momentum != 0) names.emplace_back("momentum_buffer");
    if (options.centered) names.emplace_back("grad_avg");
    return names;
  }
  template <class T>
  T root(const Operands<T>& on, const T& direction) const {
    if (!options_.centered) return math::sqrt(on.state[0]);
    T& mean = on.state[options_.momentum == 0 ? 1 : 2];
    math::mul_(mean, options_.alpha);
    math::add_(mean, direction, 1 - options_.alpha);
    T variance = math::clone(on.state[0]);
    math::addcmul_(variance, mean, mean, -1);
    math::sqrt_(variance);
    return variance;
  }
  std::string refuse_sparse_rule() const override { return refusal_of_sparse("SGD, Adagrad or SparseAdam"); }
};

}  // namespace

void RMSprop::validate() const {
  check_not_negative(kName, "lr", lr);
  check_not_negative(kName, "alpha", alpha);
  check_not_negative(kName, "eps", eps);
  check_not_negative(kName, "weight_decay", weight_decay);
  check_not_negative(kName, "momentum", momentum);
}

std::unique_ptr<FunctionalOptimizer> RMSprop::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<RmspropRule>(*this, std::move(parameters));
}

namespace {

class RpropRule final : public Rule<Rprop, RpropRule> {
 public:
  RpropRule(const Rprop& options, std::vector<at::Tensor> parameters)
      : Rule(options, {"prev", "step_size"}, std::move(parameters)) {}

  template <class T>
  void run(const Operands<T>& on) const {
    T direction = descent(on, options_.maximize, 0);
    T agreement = math::mul(direction, on.state[0]);
    math::for_each_tensor([this](at::Tensor& p, at::Tensor& g, at::Tensor& agrees, at::Tensor& before,
                                 at::Tensor& size) { move(p, g, agrees, before, size); },
                          on.parameter, direction, agreement, on.state[0], on.state[1]);
  }

 private:
  void move(at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& agreement,
            at::Tensor& before, at::Tensor& size) const {
    const at::Tensor turned = agreement.lt(0);
    at::Tensor factor = at::ones_like(agreement);
    factor.masked_fill_(agreement.gt(0), options_.eta_plus).masked_fill_(turned, options_.eta_minus);
    size.mul_(factor).clamp_(options_.step_min, options_.step_max);
    before.copy_(gradient).masked_fill_(turned, 0);
    parameter.addcmul_(before.sign(), size, -1);
  }

  at::Tensor make_slot(std::size_t slot, const at::Tensor& like) const override {
    return slot == 0 ? at::zeros_like(like) : at::full_like(like, options_.lr);
  }
  std::string refuse_sparse_rule() const override { return refusal_of_sparse("SGD, Adagrad or SparseAdam"); }
};

}  // namespace

void Rprop::validate() const {
  check_not_negative(kName, "lr", lr);
  if (!(eta_minus > 0 && eta_minus < 1)) {
    throw_invalid("Rprop: eta_minus = {}, but it must be a number above 0 and below 1", eta_minus);
  }
  if (!(eta_plus > 1 && std::isfinite(eta_plus))) {
    throw_invalid("Rprop: eta_plus = {}, but it must be a number above 1", eta_plus);
  }
  check_not_negative(kName, "step_min", step_min);
  if (!(step_max >= step_min && std::isfinite(step_max))) {
    throw_invalid("Rprop: step_max = {}, but it must be a number from step_min = {} up", step_max, step_min);
  }
}

std::unique_ptr<FunctionalOptimizer> Rprop::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<RpropRule>(*this, std::move(parameters));
}

}  // namespace torchspan::optim
