#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Resilient backpropagation (Riedmiller and Braun, ICNN 1993), by LibTorch's rules: every element has a step
/// size of its own, from lr, which grows by eta_plus while its gradient keeps its sign and shrinks by
/// eta_minus when the sign turns, within bounds; the element moves by it against the sign, and not at all
/// when the sign turned. A rate that is set later is for parameters that had no step yet. Dense gradients
/// only.
struct Rprop {
  static constexpr std::string_view kName = "Rprop";

  double lr = 0.01;  ///< the first step size
  double eta_minus = 0.5;
  double eta_plus = 1.2;
  double step_min = 1e-6;
  double step_max = 50;
  bool maximize = false;
  std::optional<bool> foreach = std::nullopt;  ///< many parameters at once; unset: on CUDA devices
  bool float32_state = false;                  ///< for half and bfloat16: state and arithmetic in float32

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
                            &torchspan::optim::Rprop::float32_state> {};
