#include <utility>

#include <torchspan/optim/adamw.h>

#include "optim/functional/adam_rule.h"

namespace torchspan::optim {
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

}  // namespace torchspan::optim
