#include <cstdint>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/adagrad.h>

namespace torchspan::optim {
namespace {

class AdagradOptimizer final : public FunctionalOptimizer {
 public:
  AdagradOptimizer(const Adagrad& options, std::vector<at::Tensor> parameters)
      : FunctionalOptimizer("Adagrad", std::move(parameters)),
        options_(options),
        states_(this->parameters().size()) {}

 private:
  struct State {
    at::Tensor sum;
    std::int64_t steps = 0;
  };

  std::string refuse_sparse(const at::Tensor& parameter) const override {
    if (parameter.is_complex()) return "which a complex parameter cannot use: let it have dense gradients";
    if (options_.weight_decay == 0) return {};
    return fmt::format(
        "which weight_decay = {} would make dense: give this parameter an optimizer with "
        "weight_decay = 0, or let it have dense gradients",
        options_.weight_decay);
  }

  void update(std::size_t index, at::Tensor& parameter, const at::Tensor& gradient) override {
    at::Tensor target = parameter.is_complex() ? at::view_as_real(parameter) : parameter;
    at::Tensor direction = parameter.is_complex() ? at::view_as_real(gradient.resolve_conj()) : gradient;
    if (options_.maximize) direction = direction.neg();
    if (options_.weight_decay != 0) direction = direction.add(target, options_.weight_decay);
    State& state = states_[index];
    if (!state.sum.defined()) state.sum = at::full_like(target, options_.initial_accumulator_value);
    ++state.steps;
    const double rate = options_.lr / (1 + static_cast<double>(state.steps - 1) * options_.lr_decay);
    if (direction.is_sparse()) {
      update_sparse(target, state.sum, direction.coalesce(), rate);
    } else {
      state.sum.addcmul_(direction, direction);
      target.addcdiv_(direction, state.sum.sqrt().add_(options_.eps), -rate);
    }
  }

  void update_sparse(at::Tensor& target, at::Tensor& sum, const at::Tensor& direction, double rate) const {
    if (direction._nnz() == 0) return;
    const at::Tensor values = direction._values();
    const auto like_direction = [&](const at::Tensor& new_values) {
      at::Tensor result = at::_sparse_coo_tensor_unsafe(direction._indices(), new_values, direction.sizes());
      return result._coalesced_(true);
    };
    sum.add_(like_direction(values.square()));
    const at::Tensor scale = sum.sparse_mask(direction)._values().sqrt_().add_(options_.eps);
    target.add_(like_direction(values / scale), -rate);
  }

  const Adagrad options_;
  std::vector<State> states_;
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
  return std::make_unique<AdagradOptimizer>(*this, std::move(parameters));
}

}  // namespace torchspan::optim
