#include <utility>

#include <torchspan/optim/adamax.h>

#include "optim/functional/adam_rule.h"

namespace torchspan::optim {
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

}  // namespace torchspan::optim
