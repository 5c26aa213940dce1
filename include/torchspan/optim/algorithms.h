#pragma once
// The optimizers and their options: SGD, Adam, AdamW and others. Includes no torch/nn.
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <torchspan/optim/functional.h>

namespace torchspan::optim {

/// Stochastic gradient descent with momentum (Sutskever et al., ICML 2013), with LibTorch's arithmetic:
///   g = gradient (negated to maximize) + weight_decay * p
///   b = g at the first step, momentum * b + (1 - dampening) * g later
///   p -= lr * (g without momentum; g + momentum * b with nesterov; else b)
/// Sparse gradients require weight_decay = 0; their momentum is sparse too.
struct SGD {
  static constexpr std::string_view kName = "SGD";
  static constexpr FixedString kWireName = "optim.SGD";

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

/// Adaptive moment estimation (Kingma and Ba, ICLR 2015), optionally amsgrad (Reddi, Kale and Kumar, ICLR
/// 2018), with LibTorch's arithmetic. Dense gradients only; t counts the parameter's steps from 1:
///   g = gradient (negated to maximize) + weight_decay * p
///   m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g²
///   w = v; with amsgrad, the largest v so far
///   p -= lr / (1 - beta1^t) * m / (sqrt(w) / sqrt(1 - beta2^t) + eps)
struct Adam {
  static constexpr std::string_view kName = "Adam";
  static constexpr FixedString kWireName = "optim.Adam";

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

/// Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019), with LibTorch's arithmetic: first p
/// *= 1 - lr * weight_decay, then a step of Adam without decay. Dense gradients only.
struct AdamW {
  static constexpr std::string_view kName = "AdamW";
  static constexpr FixedString kWireName = "optim.AdamW";

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

/// Adam for sparse gradients, with LibTorch's arithmetic. Elements absent from a gradient keep their value
/// and moments; t counts all steps of the parameter. With g the entries (negated to maximize) and m, v
/// their moments:
///   m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g² - v)
///   p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)
/// Sparse gradients only.
struct SparseAdam {
  static constexpr std::string_view kName = "SparseAdam";
  static constexpr FixedString kWireName = "optim.SparseAdam";

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

/// Adam with the infinity norm (Kingma and Ba, ICLR 2015, section 7), with LibTorch's arithmetic; t counts
/// the parameter's steps from 1:
///   g = gradient (negated to maximize) + weight_decay * p;  m = beta1 * m + (1 - beta1) * g
///   u = max(beta2 * u, |g| + eps);  p -= lr / (1 - beta1^t) * m / u
/// Dense gradients only.
struct Adamax {
  static constexpr std::string_view kName = "Adamax";
  static constexpr FixedString kWireName = "optim.Adamax";

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

/// Per-element step sizes from the sum of squared gradients (Duchi, Hazan and Singer, JMLR 2011), with
/// LibTorch's arithmetic; t counts the parameter's steps from 1:
///   g = gradient (negated to maximize) + weight_decay * p;  s = initial_accumulator_value + sum of g²
///   p -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)
/// A sparse gradient updates only the elements it contains and requires weight_decay = 0.
struct Adagrad {
  static constexpr std::string_view kName = "Adagrad";
  static constexpr FixedString kWireName = "optim.Adagrad";

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

/// Per-element step sizes from running averages (Zeiler, arXiv 1212.5701), with LibTorch's arithmetic:
///   g = gradient (negated to maximize) + weight_decay * p;  s = rho * s + (1 - rho) * g²
///   d = sqrt(u + eps) / sqrt(s + eps) * g;  u = rho * u + (1 - rho) * d²;  p -= lr * d
/// Dense gradients only.
struct Adadelta {
  static constexpr std::string_view kName = "Adadelta";
  static constexpr FixedString kWireName = "optim.Adadelta";

  double lr = 1.0;
  double rho = 0.9;
  double eps = 1e-6;
  double weight_decay = 0;
  bool maximize = false;
  std::optional<bool> foreach = std::nullopt;  ///< multi-tensor operations; unset: on CUDA only
  bool float32_state = false;                  ///< float32 state and arithmetic for half and bfloat16
  bool master_weights = false;  ///< float32_state, and a float32 copy of the parameter in the state

  void validate() const;
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

/// Steps divided by the gradient's running root mean square (Hinton's lectures, 2012), with LibTorch's
/// arithmetic; dense gradients only:
///   g = gradient (negated to maximize) + weight_decay * p;  s = alpha * s + (1 - alpha) * g²
///   r = sqrt(s) + eps
///   centered (Graves, arXiv 1308.0850): a = alpha * a + (1 - alpha) * g;  r = sqrt(s - a²) + eps
///   p -= lr * g / r; with momentum: b = momentum * b + g / r, p -= lr * b
struct RMSprop {
  static constexpr std::string_view kName = "RMSprop";
  static constexpr FixedString kWireName = "optim.RMSprop";

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

/// Resilient backpropagation (Riedmiller and Braun, ICNN 1993), with LibTorch's arithmetic. Each element
/// has a step size, initially lr, within [step_min, step_max]. It grows by eta_plus while the gradient
/// keeps its sign and shrinks by eta_minus when the sign flips. The element moves by the step size against
/// the sign; on a flip it does not move. A later change of lr affects only parameters that have not
/// stepped. Dense gradients only.
struct Rprop {
  static constexpr std::string_view kName = "Rprop";
  static constexpr FixedString kWireName = "optim.Rprop";

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
