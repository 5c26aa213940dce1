#include "bench/optim/fused.h"

#include "device/api/torch_version.h"

#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 4)
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#endif

namespace torchspan::bench {

#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 4)
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors zeros_like_each(const Tensors& tensors) {
  Tensors zeros;
  for (const at::Tensor& tensor : tensors) zeros.push_back(at::zeros_like(tensor.detach()));
  return zeros;
}

struct State {
  explicit State(const Tensors& leaves) : first(zeros_like_each(leaves)), second(zeros_like_each(leaves)) {
    for (const at::Tensor& leaf : leaves) {
      parameters.push_back(leaf.detach());
      gradients.push_back(leaf.grad());
      steps.push_back(at::zeros({}));
    }
  }
  void count() { at::_foreach_add_(steps, 1); }

  Tensors parameters, gradients, first, second, steps;
};

}  // namespace

std::function<void()> fused_step(const std::string& variant, std::vector<at::Tensor> parameters) {
  auto state = std::make_shared<State>(parameters);
  const auto adam = [&](auto kernel, double weight_decay) {
    return [=] {
      state->count();
      kernel(state->parameters, state->gradients, state->first, state->second, state->steps, weight_decay);
    };
  };
  if (variant == "Adam") {
    return adam(
        [](auto& p, auto& g, auto& m, auto& v, auto& t, double decay) {
          at::_fused_adam_(p, g, m, v, {}, t, 1e-3, 0.9, 0.999, decay, 1e-8, false, false);
        },
        0);
  }
  if (variant == "AdamW") {
    return adam(
        [](auto& p, auto& g, auto& m, auto& v, auto& t, double decay) {
          at::_fused_adamw_(p, g, m, v, {}, t, 1e-3, 0.9, 0.999, decay, 1e-8, false, false);
        },
        0.01);
  }
  if (variant == "Adagrad") {
    return [state] {
      state->count();
      at::_fused_adagrad_(state->parameters, state->gradients, state->first, state->steps, 0.01, 0, 0, 1e-10,
                          false);
    };
  }
  if (variant == "SGD" || variant == "SGD_momentum") {
    const bool momentum = variant == "SGD_momentum";
    return [state, momentum] {
      at::_fused_sgd_(state->parameters, state->gradients, momentum ? state->first : Tensors{},
                      momentum ? 0.01 : 0.0, momentum ? 0.9 : 0.0, 1e-3, 0, false, false, false);
    };
  }
  return {};
}
#else
std::function<void()> fused_step(const std::string&, std::vector<at::Tensor>) { return {}; }
#endif

}  // namespace torchspan::bench
