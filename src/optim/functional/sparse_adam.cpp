#include <cmath>
#include <utility>

#include <torchspan/optim/sparse_adam.h>

#include "optim/functional/rule.h"

namespace torchspan::optim {
namespace {

class SparseAdamRule final : public RuleOptimizer {
 public:
  SparseAdamRule(const SparseAdam& options, std::vector<at::Tensor> parameters)
      : RuleOptimizer(SparseAdam::kName, settings_of(options, {"exp_avg", "exp_avg_sq"}),
                      std::move(parameters)),
        options_(options) {}
  double lr() const override { return options_.lr; }
  void set_lr(double lr) override {
    check_not_negative(SparseAdam::kName, "lr", lr);
    options_.lr = lr;
  }

 private:
  void apply(const Operands<at::Tensor>&) const override {}
  void apply(const Operands<Tensors>&) const override {}
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

  SparseAdam options_;
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

}  // namespace torchspan::optim
