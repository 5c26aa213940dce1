#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Steps divided by the gradient's running root mean square (Hinton's lectures, 2012), with LibTorch's
/// arithmetic; dense gradients only:
///   g = gradient (negated to maximize) + weight_decay * p;  s = alpha * s + (1 - alpha) * g²
///   r = sqrt(s) + eps
///   centered (Graves, arXiv 1308.0850): a = alpha * a + (1 - alpha) * g;  r = sqrt(s - a²) + eps
///   p -= lr * g / r; with momentum: b = momentum * b + g / r, p -= lr * b
struct RMSprop {
  static constexpr std::string_view kName = "RMSprop";

  double lr = 0.01;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;
  bool maximize = false;
  std::optional<bool> foreach = std::nullopt;  ///< multi-tensor operations; unset: on CUDA only
  bool float32_state = false;                  ///< float32 state and arithmetic for half and bfloat16
  bool master_weights = false;  ///< float32_state, and a float32 copy of the parameter in the state

  void validate() const;
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::RMSprop>
    : torchspan::WireStruct<torchspan::optim::RMSprop, "optim.RMSprop", &torchspan::optim::RMSprop::lr,
                            &torchspan::optim::RMSprop::alpha, &torchspan::optim::RMSprop::eps,
                            &torchspan::optim::RMSprop::weight_decay, &torchspan::optim::RMSprop::momentum,
                            &torchspan::optim::RMSprop::centered, &torchspan::optim::RMSprop::maximize,
                            &torchspan::optim::RMSprop::foreach, &torchspan::optim::RMSprop::float32_state,
                            &torchspan::optim::RMSprop::master_weights> {};
