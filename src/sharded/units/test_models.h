#pragma once
// Models for the tests of FullyShardedDataParallel.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <torchspan/sharded.h>

namespace torchspan::sharded::testing {

inline at::Tensor values(at::IntArrayRef sizes, double seed) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::arange(count, at::kDouble).mul(0.71).add(seed).sin().reshape(sizes).mul(0.5);
}

constexpr std::int64_t kWidth = 5;

/// A matrix product, a bias and an element-wise scale, which autograd saves in three ways.
struct DenseImpl : torch::nn::Module {
  explicit DenseImpl(double seed, bool frozen_bias = false) {
    weight = register_parameter("weight", values({kWidth, kWidth}, seed));
    bias = register_parameter("bias", values({kWidth}, seed + 1), !frozen_bias);
    scale = register_parameter("scale", values({kWidth}, seed + 2) + 1);
    seen = register_buffer("seen", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen += 1;
    return at::tanh(at::linear(x, weight, bias)) * scale;
  }
  at::Tensor weight, bias, scale, seen;
};
TORCH_MODULE(Dense);

/// Saves its weight itself, not a view.
struct FilterImpl : torch::nn::Module {
  explicit FilterImpl(double seed) {
    weight = register_parameter("weight", values({kWidth, 1, 3}, seed));
    unused = register_parameter("unused", values({2, 3}, seed + 1));
  }
  at::Tensor forward(const at::Tensor& x) const {
    return at::conv1d(x.unsqueeze(0).transpose(1, 2), weight, {}, 1, 1, 1, kWidth)
               .transpose(1, 2)
               .squeeze(0) +
           x;
  }
  at::Tensor weight, unused;
};
TORCH_MODULE(Filter);

/// A unit in which there may be another one.
template <class Inner>
struct NestImpl : torch::nn::Module {
  explicit NestImpl(double seed) : inner(register_module("inner", Inner(seed + 7))) {
    gain = register_parameter("gain", values({}, seed) + 1);
  }
  at::Tensor forward(at::Tensor x) { return inner->forward(x * gain) + x; }
  Inner inner;
  at::Tensor gain;
};
template <class Inner>
class Nest : public torch::nn::ModuleHolder<NestImpl<Inner>> {
 public:
  using torch::nn::ModuleHolder<NestImpl<Inner>>::ModuleHolder;
};

using Layer = std::function<at::Tensor(const at::Tensor&)>;

/// Computes a layer without a graph; backward computes it again in an inner pass, which finds the gradients of the
/// parameters.
struct Recomputed : torch::autograd::Function<Recomputed> {
  struct Held : torch::CustomClassHolder {
    explicit Held(Layer layer) : layer(std::move(layer)) {}
    Layer layer;
  };
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const c10::intrusive_ptr<Held>& held) {
    context->save_for_backward({x});
    context->saved_data["layer"] = c10::IValue::make_capsule(held);
    return held->layer(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::AutoGradMode grad_mode(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const auto held = c10::static_intrusive_pointer_cast<Held>(context->saved_data["layer"].toCapsule());
    held->layer(x).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

inline at::Tensor recomputed(const Layer& layer, const at::Tensor& x) {
  return Recomputed::apply(x, c10::make_intrusive<Recomputed::Held>(layer));
}

/// What a random model consists of, and what a program does with it. Equal on all ranks.
struct LayerSpec {
  int kind = 0;             ///< 0: Dense, 1: Filter, 2: Nest of Dense, 3: the module of an earlier layer
  bool unit = false;        ///< is a ts::Sharded
  bool inner_unit = false;  ///< of a Nest
  bool recompute = false;
  bool frozen_bias = false;
  std::size_t earlier = 0;  ///< whose module it is
};

struct RandomNetImpl : torch::nn::Module {
  explicit RandomNetImpl(const std::vector<LayerSpec>& specs) : specs(specs) {
    head = register_parameter("head", values({kWidth, 2}, 99));
    for (std::size_t i = 0; i < specs.size(); ++i) add(i, static_cast<double>(10 * i));
  }
  at::Tensor forward(at::Tensor x, const std::vector<std::size_t>& skipped) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (std::find(skipped.begin(), skipped.end(), i) != skipped.end()) continue;
      x = specs[i].recompute && x.requires_grad() ? recomputed(layers[i], x) : layers[i](x);
    }
    return at::matmul(x, head);
  }
  std::vector<LayerSpec> specs;
  std::vector<Layer> layers;
  at::Tensor head;

 private:
  template <class Holder>
  void push(std::size_t i, const Holder& holder) {
    register_module("layer" + std::to_string(i), holder);
    layers.push_back([module = holder.ptr()](const at::Tensor& x) { return module->forward(x); });
  }
  void add(std::size_t i, double seed) {
    const LayerSpec& spec = specs[i];
    if (spec.kind == 3) {
      layers.push_back(layers[spec.earlier]);
    } else if (spec.kind == 0) {
      spec.unit ? push(i, Sharded<Dense>(seed, spec.frozen_bias)) : push(i, Dense(seed, spec.frozen_bias));
    } else if (spec.kind == 1) {
      spec.unit ? push(i, Sharded<Filter>(seed)) : push(i, Filter(seed));
    } else if (spec.inner_unit) {
      spec.unit ? push(i, Sharded<Nest<Sharded<Dense>>>(seed)) : push(i, Nest<Sharded<Dense>>(seed));
    } else {
      spec.unit ? push(i, Sharded<Nest<Dense>>(seed)) : push(i, Nest<Dense>(seed));
    }
  }
};
TORCH_MODULE(RandomNet);

}  // namespace torchspan::sharded::testing
