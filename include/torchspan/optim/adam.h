#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Adaptive moment estimation (Kingma and Ba, ICLR 2015), optionally amsgrad (Reddi, Kale and Kumar, ICLR
/// 2018), with LibTorch's arithmetic. Dense gradients only; t counts the parameter's steps from 1:
///   g = gradient (negated to maximize) + weight_decay * p
///   m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g²
///   w = v; with amsgrad, the largest v so far
///   p -= lr / (1 - beta1^t) * m / (sqrt(w) / sqrt(1 - beta2^t) + eps)
struct Adam {
  static constexpr std::string_view kName = "Adam";

  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  std::optional<bool> foreach = std::nullopt;  ///< multi-tensor operations; unset: fused on devices
  bool float32_state = false;                  ///< float32 state and arithmetic for half and bfloat16
  bool master_weights = false;  ///< float32_state, and a float32 copy of the parameter in the state

  void validate() const;
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::Adam>
    : torchspan::WireStruct<torchspan::optim::Adam, "optim.Adam", &torchspan::optim::Adam::lr,
                            &torchspan::optim::Adam::beta1, &torchspan::optim::Adam::beta2,
                            &torchspan::optim::Adam::eps, &torchspan::optim::Adam::weight_decay,
                            &torchspan::optim::Adam::amsgrad, &torchspan::optim::Adam::maximize,
                            &torchspan::optim::Adam::foreach, &torchspan::optim::Adam::float32_state,
                            &torchspan::optim::Adam::master_weights> {};
