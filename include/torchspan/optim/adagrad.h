#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Per-element step sizes from the sum of squared gradients (Duchi, Hazan and Singer, JMLR 2011), with
/// LibTorch's arithmetic; t counts the parameter's steps from 1:
///   g = gradient (negated to maximize) + weight_decay * p;  s = initial_accumulator_value + sum of g²
///   p -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)
/// A sparse gradient updates only the elements it contains and requires weight_decay = 0.
struct Adagrad {
  static constexpr std::string_view kName = "Adagrad";

  double lr = 0.01;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;
  std::optional<bool> foreach = std::nullopt;  ///< multi-tensor operations; unset: on CUDA only
  bool float32_state = false;                  ///< float32 state and arithmetic for half and bfloat16
  bool master_weights = false;  ///< float32_state, and a float32 copy of the parameter in the state

  void validate() const;
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::Adagrad>
    : torchspan::WireStruct<torchspan::optim::Adagrad, "optim.Adagrad", &torchspan::optim::Adagrad::lr,
                            &torchspan::optim::Adagrad::lr_decay, &torchspan::optim::Adagrad::weight_decay,
                            &torchspan::optim::Adagrad::initial_accumulator_value,
                            &torchspan::optim::Adagrad::eps, &torchspan::optim::Adagrad::maximize,
                            &torchspan::optim::Adagrad::foreach, &torchspan::optim::Adagrad::float32_state,
                            &torchspan::optim::Adagrad::master_weights> {};
