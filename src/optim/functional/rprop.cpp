#include <cmath>
#include <fmt/format.h>
#include <utility>

#include <torchspan/optim/rprop.h>

#include "optim/functional/rule.h"

namespace torchspan::optim {
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
    throw Error(ErrorKind::kInvalid,
                fmt::format("Rprop: eta_minus = {}, but it must be a number above 0 and below 1", eta_minus));
  }
  if (!(eta_plus > 1 && std::isfinite(eta_plus))) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("Rprop: eta_plus = {}, but it must be a number above 1", eta_plus));
  }
  check_not_negative(kName, "step_min", step_min);
  if (!(step_max >= step_min && std::isfinite(step_max))) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("Rprop: step_max = {}, but it must be a number from step_min = {} up", step_max,
                            step_min));
  }
}

std::unique_ptr<FunctionalOptimizer> Rprop::build(std::vector<at::Tensor> parameters) const {
  validate();
  return std::make_unique<RpropRule>(*this, std::move(parameters));
}

}  // namespace torchspan::optim
