#include <cmath>
#include <fmt/format.h>
#include <utility>

#include <torchspan/optim/sgd.h>

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
    throw Error(ErrorKind::kInvalid, "SGD needs a learning rate, as in SGD{.lr = 0.01}");
  }
  check_not_negative(kName, "lr", lr);
  check_not_negative(kName, "momentum", momentum);
  check_not_negative(kName, "weight_decay", weight_decay);
  if (!std::isfinite(dampening)) {
    throw Error(ErrorKind::kInvalid, fmt::format("SGD: dampening = {}, but it must be a number", dampening));
  }
  if (nesterov && (momentum == 0 || dampening != 0)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("SGD: nesterov = true with momentum = {} and dampening = {}, but "
                            "it needs a momentum above 0 and no dampening",
                            momentum, dampening));
  }
}

std::unique_ptr<FunctionalOptimizer> SGD::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<SgdRule>(*this, std::move(parameters));
}

}  // namespace torchspan::optim
