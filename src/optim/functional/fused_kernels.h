#pragma once
#include <array>
#include <cstddef>

namespace torchspan::optim {

/// The buffers of one parameter: `count` elements each, in the same order in memory. No two overlap.
template <class T>
struct FusedBuffers {
  T* parameter;
  const T* gradient;
  std::array<T*, 3> state;  ///< the slots of the rule in their order, then null
  std::size_t count;
};

/// A step of SGD (algorithms.h has the formula).
struct SgdStep {
  double lr;
  double momentum;
  double gradient_share;  ///< of the gradient in the momentum buffer: 1 - dampening, and 1 at the first step
  double weight_decay;
  bool nesterov;
  bool maximize;
  std::size_t slots() const { return momentum == 0 ? 0 : 1; }
};

/// A step of Adam or AdamW (algorithms.h has the formula).
struct AdamStep {
  double rate;        ///< lr / (1 - beta1^t)
  double correction;  ///< sqrt(1 - beta2^t)
  double beta1, beta2, eps;
  double weight_decay;      ///< is added to the gradient; AdamW: 0
  double parameter_factor;  ///< AdamW: 1 - lr * weight_decay; Adam: 1
  bool amsgrad;
  bool maximize;
  std::size_t slots() const { return amsgrad ? 3 : 2; }
};

/// A step of Adagrad (algorithms.h has the formula).
struct AdagradStep {
  double rate;  ///< lr / (1 + (t - 1) * lr_decay)
  double eps;
  double weight_decay;
  bool maximize;
  std::size_t slots() const { return 1; }
};

/// A step of RMSprop (algorithms.h has the formula).
struct RmspropStep {
  double lr, alpha, eps;
  double weight_decay;
  double momentum;
  bool centered;
  bool maximize;
  std::size_t slots() const { return 1U + (momentum == 0 ? 0 : 1) + (centered ? 1 : 0); }
};

/// Applies a step, one of the structs above, to each element in one pass over memory. T is float or double.
/// Each operation is rounded separately (no fused multiply-add), so that the results have the same bits on
/// every processor and however a tensor is divided among threads.
template <class Step, class T>
void run_fused(const Step& step, const FusedBuffers<T>& on);

}  // namespace torchspan::optim
