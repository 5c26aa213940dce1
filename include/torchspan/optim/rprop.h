#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Resilient backpropagation (Riedmiller and Braun, ICNN 1993), with LibTorch's arithmetic. Each element
/// has a step size, initially lr, within [step_min, step_max]. It grows by eta_plus while the gradient
/// keeps its sign and shrinks by eta_minus when the sign flips. The element moves by the step size against
/// the sign; on a flip it does not move. A later change of lr affects only parameters that have not
/// stepped. Dense gradients only.
struct Rprop {
  static constexpr std::string_view kName = "Rprop";

  double lr = 0.01;  ///< initial step size
  double eta_minus = 0.5;
  double eta_plus = 1.2;
  double step_min = 1e-6;
  double step_max = 50;
  bool maximize = false;
  std::optional<bool> foreach = std::nullopt;  ///< multi-tensor operations; unset: on CUDA only
  bool float32_state = false;                  ///< float32 state and arithmetic for half and bfloat16
  bool master_weights = false;  ///< float32_state, and a float32 copy of the parameter in the state

  void validate() const;
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::Rprop>
    : torchspan::WireStruct<torchspan::optim::Rprop, "optim.Rprop", &torchspan::optim::Rprop::lr,
                            &torchspan::optim::Rprop::eta_minus, &torchspan::optim::Rprop::eta_plus,
                            &torchspan::optim::Rprop::step_min, &torchspan::optim::Rprop::step_max,
                            &torchspan::optim::Rprop::maximize, &torchspan::optim::Rprop::foreach,
                            &torchspan::optim::Rprop::float32_state,
                            &torchspan::optim::Rprop::master_weights> {};
