#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Steps in the parameter's own units (Zeiler, arXiv 1212.5701), by LibTorch's rules:
///   g = gradient (negated to maximize) + weight_decay * p;  s = rho * s + (1 - rho) * g²
///   d = sqrt(u + eps) / sqrt(s + eps) * g;  u = rho * u + (1 - rho) * d²;  p -= lr * d
/// Dense gradients only.
struct Adadelta {
  static constexpr std::string_view kName = "Adadelta";

  double lr = 1.0;
  double rho = 0.9;
  double eps = 1e-6;
  double weight_decay = 0;
  bool maximize = false;
  std::optional<bool> foreach = std::nullopt;  ///< many parameters at once; unset: on CUDA devices
  bool float32_state = false;                  ///< for half and bfloat16: state and arithmetic in float32

  void validate() const;
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::Adadelta>
    : torchspan::WireStruct<torchspan::optim::Adadelta, "optim.Adadelta", &torchspan::optim::Adadelta::lr,
                            &torchspan::optim::Adadelta::rho, &torchspan::optim::Adadelta::eps,
                            &torchspan::optim::Adadelta::weight_decay, &torchspan::optim::Adadelta::maximize,
                            &torchspan::optim::Adadelta::foreach,
                            &torchspan::optim::Adadelta::float32_state> {};
