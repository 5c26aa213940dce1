#include <fmt/format.h>
#include <utility>

#include <torchspan/optim/adadelta.h>

#include "optim/functional/rule.h"

namespace torchspan::optim {
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
    throw Error(ErrorKind::kInvalid,
                fmt::format("Adadelta: rho = {}, but it must be a number from 0 to 1", rho));
  }
  check_not_negative(kName, "eps", eps);
  check_not_negative(kName, "weight_decay", weight_decay);
}

std::unique_ptr<FunctionalOptimizer> Adadelta::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<AdadeltaRule>(*this, std::move(parameters));
}

}  // namespace torchspan::optim
