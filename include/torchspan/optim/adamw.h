#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Adam with the decay apart from the gradient (Loshchilov and Hutter, ICLR 2019), by LibTorch's rules: first
/// p *= 1 - lr * weight_decay, then a step of Adam without decay. Dense gradients only.
struct AdamW {
  static constexpr std::string_view kName = "AdamW";

  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  bool amsgrad = false;
  bool maximize = false;
  std::optional<bool> foreach = std::nullopt;  ///< many parameters at once; unset: on CUDA devices
  bool float32_state = false;                  ///< for half and bfloat16: state and arithmetic in float32

  void validate() const;
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::AdamW>
    : torchspan::WireStruct<torchspan::optim::AdamW, "optim.AdamW", &torchspan::optim::AdamW::lr,
                            &torchspan::optim::AdamW::beta1, &torchspan::optim::AdamW::beta2,
                            &torchspan::optim::AdamW::eps, &torchspan::optim::AdamW::weight_decay,
                            &torchspan::optim::AdamW::amsgrad, &torchspan::optim::AdamW::maximize,
                            &torchspan::optim::AdamW::foreach, &torchspan::optim::AdamW::float32_state> {};
