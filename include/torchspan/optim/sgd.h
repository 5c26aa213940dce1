#pragma once
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Stochastic gradient descent with momentum (Sutskever et al., ICML 2013), with LibTorch's arithmetic:
///   g = gradient (negated to maximize) + weight_decay * p
///   b = g at the first step, momentum * b + (1 - dampening) * g later
///   p -= lr * (g without momentum; g + momentum * b with nesterov; else b)
/// Sparse gradients require weight_decay = 0; their momentum is sparse too.
struct SGD {
  static constexpr std::string_view kName = "SGD";

  double lr = std::numeric_limits<double>::quiet_NaN();  ///< required
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;  ///< requires momentum > 0 and dampening = 0
  bool maximize = false;
  std::optional<bool> foreach = std::nullopt;  ///< multi-tensor operations; unset: fused on devices
  bool float32_state = false;                  ///< float32 state and arithmetic for half and bfloat16
  bool master_weights = false;  ///< float32_state, and a float32 copy of the parameter in the state

  void validate() const;
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::SGD>
    : torchspan::WireStruct<torchspan::optim::SGD, "optim.SGD", &torchspan::optim::SGD::lr,
                            &torchspan::optim::SGD::momentum, &torchspan::optim::SGD::dampening,
                            &torchspan::optim::SGD::weight_decay, &torchspan::optim::SGD::nesterov,
                            &torchspan::optim::SGD::maximize, &torchspan::optim::SGD::foreach,
                            &torchspan::optim::SGD::float32_state, &torchspan::optim::SGD::master_weights> {};
