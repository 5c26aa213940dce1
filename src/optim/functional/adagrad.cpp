#include <utility>

#include <torchspan/optim/adagrad.h>

#include "optim/functional/rule.h"

namespace torchspan::optim {
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

}  // namespace torchspan::optim
