#include <cmath>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/sgd.h>

namespace torchspan::optim {
namespace {

class SgdOptimizer final : public FunctionalOptimizer {
 public:
  SgdOptimizer(const SGD& options, std::vector<at::Tensor> parameters)
      : FunctionalOptimizer("SGD", std::move(parameters)),
        options_(options),
        momentum_buffers_(this->parameters().size()) {}

 private:
  std::string refuse_sparse(const at::Tensor&) const override {
    if (options_.weight_decay == 0) return {};
    return fmt::format(
        "which weight_decay = {} would make dense: give this parameter an optimizer with "
        "weight_decay = 0, or let it have dense gradients",
        options_.weight_decay);
  }

  void update(std::size_t index, at::Tensor& parameter, const at::Tensor& gradient) override {
    at::Tensor direction = options_.maximize ? gradient.neg() : gradient;
    if (options_.weight_decay != 0) direction = direction.add(parameter, options_.weight_decay);
    if (options_.momentum != 0) {
      const at::Tensor& buffer = advance(momentum_buffers_[index], direction);
      direction = options_.nesterov ? sum(direction, buffer, options_.momentum) : buffer;
    }
    parameter.add_(direction, -options_.lr);
  }

  const at::Tensor& advance(at::Tensor& buffer, const at::Tensor& direction) const {
    if (!buffer.defined()) {
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

  const SGD options_;
  std::vector<at::Tensor> momentum_buffers_;
};

}  // namespace

void SGD::validate() const {
  if (std::isnan(lr)) {
    throw Error(ErrorKind::kInvalid, "SGD needs a learning rate: write SGD{.lr = 0.01}");
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
  return std::make_unique<SgdOptimizer>(*this, std::move(parameters));
}

}  // namespace torchspan::optim
