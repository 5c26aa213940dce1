#include <utility>

#include <torchspan/optim/rmsprop.h>

#include "optim/functional/rule.h"

namespace torchspan::optim {
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

}  // namespace torchspan::optim
