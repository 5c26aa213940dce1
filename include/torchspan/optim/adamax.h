#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Adam with the infinity norm (Kingma and Ba, ICLR 2015, section 7), with LibTorch's arithmetic; t counts
/// the parameter's steps from 1:
///   g = gradient (negated to maximize) + weight_decay * p;  m = beta1 * m + (1 - beta1) * g
///   u = max(beta2 * u, |g| + eps);  p -= lr / (1 - beta1^t) * m / u
/// Dense gradients only.
struct Adamax {
  static constexpr std::string_view kName = "Adamax";

  double lr = 2e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
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
struct torchspan::Wire<torchspan::optim::Adamax>
    : torchspan::WireStruct<torchspan::optim::Adamax, "optim.Adamax", &torchspan::optim::Adamax::lr,
                            &torchspan::optim::Adamax::beta1, &torchspan::optim::Adamax::beta2,
                            &torchspan::optim::Adamax::eps, &torchspan::optim::Adamax::weight_decay,
                            &torchspan::optim::Adamax::maximize, &torchspan::optim::Adamax::foreach,
                            &torchspan::optim::Adamax::float32_state,
                            &torchspan::optim::Adamax::master_weights> {};
