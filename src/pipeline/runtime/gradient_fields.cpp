#include "pipeline/runtime/gradient_fields.h"

#include <utility>

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/grad_mode.h>

namespace torchspan::pipeline {

at::Tensor sum_of_gradients(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() ? a : b;
  return a.is_sparse() && !b.is_sparse() ? b + a : a + b;
}

void put_gradient(const at::Tensor& parameter, at::Tensor before, at::Tensor gradient) {
  const torch::autograd::AutoGradMode no_grad(false);
  at::Tensor& field = parameter.mutable_grad();
  if (!gradient.defined()) {
    field = std::move(before);
  } else if (!before.defined()) {
    field = std::move(gradient);
  } else if (before.is_sparse() && !gradient.is_sparse()) {
    field = gradient + before;
  } else {
    field = before.add_(gradient);
  }
}

}  // namespace torchspan::pipeline
