#pragma once
// Operators that LibTorch has for some devices only, for the stand-in devices while a StandInOperator lives. They run
// the CPU's kernel, which LibTorch 1.13 lacks: there, the formula of the operator.
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "tests/support/stand_in_device.h"

namespace torchspan::testing {

using BoxedOperator = std::function<void(const c10::OperatorHandle&, torch::jit::Stack&)>;

/// A kernel of the stand-in devices for an operator, as in "_fused_adam_". Counts its calls.
class StandInOperator {
 public:
  StandInOperator(const std::string& name, BoxedOperator run)
      : name_("aten::" + name),
        library_(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__) {
    auto kernel = std::make_unique<Kernel>();
    kernel->calls = calls_;
    kernel->run = std::move(run);
    library_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }
  int calls() const { return *calls_; }
  /// False in LibTorch releases without the operator, which is never called then.
  bool exists() const { return c10::Dispatcher::singleton().findSchema({name_, ""}).has_value(); }

 private:
  struct Kernel final : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
      ++*calls;
      run(op, *stack);
    }
    std::shared_ptr<std::atomic<int>> calls;
    BoxedOperator run;
  };

  const std::string name_;
  const std::shared_ptr<std::atomic<int>> calls_ = std::make_shared<std::atomic<int>>(0);
  torch::Library library_;
};

namespace stand_in_detail {

/// Runs the CPU's kernel, or `formula` where LibTorch has none.
inline BoxedOperator cpu_or(std::function<void(torch::jit::Stack&)> formula) {
  return [formula = std::move(formula)](const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    if (op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return fall_back(op, &stack);
    formula(stack);
    torch::jit::drop(stack, op.schema().arguments().size());
  };
}

inline void fused_adam(torch::jit::Stack& stack) {
  const auto list = [&](std::size_t i) { return stack.at(i).toTensorVector(); };
  const auto number = [&](std::size_t i) { return stack.at(i).toDouble(); };
  const std::vector<at::Tensor> parameters = list(0), gradients = list(1), means = list(2), squares = list(3),
                                largest = list(4), steps = list(5);
  const double lr = number(6), beta1 = number(7), beta2 = number(8), weight_decay = number(9),
               eps = number(10);
  const bool amsgrad = stack.at(11).toBool(), maximize = stack.at(12).toBool();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const double t = on_cpu(steps[i]).item<double>();
    const at::Tensor gradient = (maximize ? -gradients[i] : gradients[i]) + parameters[i] * weight_decay;
    means[i].mul_(beta1).add_(gradient, 1 - beta1);
    squares[i].mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
    if (amsgrad) largest[i].copy_(at::maximum(largest[i], squares[i]));
    const at::Tensor scale =
        (amsgrad ? largest : squares)[i].sqrt() / std::sqrt(1 - std::pow(beta2, t)) + eps;
    parameters[i].addcdiv_(means[i], scale, -lr / (1 - std::pow(beta1, t)));
  }
}

inline void check_and_unscale(torch::jit::Stack& stack) {
  const at::Tensor found_inf = stack.at(1).toTensor(), inverse = stack.at(2).toTensor();
  for (const at::Tensor& gradient : stack.at(0).toTensorVector()) {
    found_inf.copy_(at::maximum(found_inf, gradient.isfinite().all().logical_not().to(at::kFloat)));
    gradient.mul_(inverse.to(gradient.scalar_type()));
  }
}

/// Of operators that exist only in releases with a kernel for the CPU.
inline void no_formula(torch::jit::Stack&) { throw std::logic_error("LibTorch has no kernel for the CPU"); }

}  // namespace stand_in_detail

inline StandInOperator stand_in_fused_adam() {
  return {"_fused_adam_", stand_in_detail::cpu_or(&stand_in_detail::fused_adam)};
}
inline StandInOperator stand_in_fused_adamw() {
  return {"_fused_adamw_", stand_in_detail::cpu_or(&stand_in_detail::no_formula)};
}
inline StandInOperator stand_in_fused_sgd() {
  return {"_fused_sgd_", stand_in_detail::cpu_or(&stand_in_detail::no_formula)};
}
inline StandInOperator stand_in_check_and_unscale() {
  return {"_amp_foreach_non_finite_check_and_unscale_",
          stand_in_detail::cpu_or(&stand_in_detail::check_and_unscale)};
}

}  // namespace torchspan::testing
