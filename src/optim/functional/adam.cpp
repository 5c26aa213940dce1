#include <utility>

#include <torchspan/optim/adam.h>

#include "optim/functional/adam_rule.h"

namespace torchspan::optim {
namespace {

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

}  // namespace torchspan::optim
