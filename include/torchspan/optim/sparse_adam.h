#pragma once
#include <memory>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer_spec.h>

namespace torchspan::optim {

/// Adam for sparse gradients, with LibTorch's arithmetic. Elements absent from a gradient keep their value
/// and moments; t counts all steps of the parameter. With g the entries (negated to maximize) and m, v
/// their moments:
///   m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g² - v)
///   p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)
/// Sparse gradients only.
struct SparseAdam {
  static constexpr std::string_view kName = "SparseAdam";

  double lr = 1e-3;  ///< > 0
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;  ///< > 0
  bool maximize = false;
  bool float32_state = false;   ///< float32 state and arithmetic for half and bfloat16
  bool master_weights = false;  ///< float32_state, and a float32 copy of the parameter in the state

  void validate() const;
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::SparseAdam>
    : torchspan::WireStruct<
          torchspan::optim::SparseAdam, "optim.SparseAdam", &torchspan::optim::SparseAdam::lr,
          &torchspan::optim::SparseAdam::beta1, &torchspan::optim::SparseAdam::beta2,
          &torchspan::optim::SparseAdam::eps, &torchspan::optim::SparseAdam::maximize,
          &torchspan::optim::SparseAdam::float32_state, &torchspan::optim::SparseAdam::master_weights> {};
