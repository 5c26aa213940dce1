#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019), with LibTorch's arithmetic: first p
/// *= 1 - lr * weight_decay, then a step of Adam without decay. Dense gradients only.
struct AdamW {
  static constexpr std::string_view kName = "AdamW";

  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
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
struct torchspan::Wire<torchspan::optim::AdamW>
    : torchspan::WireStruct<torchspan::optim::AdamW, "optim.AdamW", &torchspan::optim::AdamW::lr,
                            &torchspan::optim::AdamW::beta1, &torchspan::optim::AdamW::beta2,
                            &torchspan::optim::AdamW::eps, &torchspan::optim::AdamW::weight_decay,
                            &torchspan::optim::AdamW::amsgrad, &torchspan::optim::AdamW::maximize,
                            &torchspan::optim::AdamW::foreach, &torchspan::optim::AdamW::float32_state,
                            &torchspan::optim::AdamW::master_weights> {};
