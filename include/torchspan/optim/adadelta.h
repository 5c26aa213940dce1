#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Per-element step sizes from running averages (Zeiler, arXiv 1212.5701), with LibTorch's arithmetic:
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
  std::optional<bool> foreach = std::nullopt;  ///< multi-tensor operations; unset: on CUDA only
  bool float32_state = false;                  ///< float32 state and arithmetic for half and bfloat16
  bool master_weights = false;  ///< float32_state, and a float32 copy of the parameter in the state

  void validate() const;
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::Adadelta>
    : torchspan::WireStruct<torchspan::optim::Adadelta, "optim.Adadelta", &torchspan::optim::Adadelta::lr,
                            &torchspan::optim::Adadelta::rho, &torchspan::optim::Adadelta::eps,
                            &torchspan::optim::Adadelta::weight_decay, &torchspan::optim::Adadelta::maximize,
                            &torchspan::optim::Adadelta::foreach, &torchspan::optim::Adadelta::float32_state,
                            &torchspan::optim::Adadelta::master_weights> {};
