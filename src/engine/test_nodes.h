#pragma once
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include "engine/api/graph_pass.h"
#include "engine/api/node_ptr.h"

namespace torchspan::engine::testing {

/// Like a send node: a root that passes the delivered gradients to its edges.
struct Outgoing : torch::autograd::Node {
  explicit Outgoing(const std::vector<at::Tensor>& sent) {
    for (const at::Tensor& tensor : sent) {
      add_input_metadata(tensor);
      add_next_edge(torch::autograd::impl::gradient_edge(tensor));
    }
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    ++runs;
    return std::move(gradients);
  }
  int runs = 0;
};

/// Like a receive node: a leaf that takes gradients out of the pass.
struct Incoming : PassNode {
  using Take = std::function<void(torch::autograd::variable_list)>;
  explicit Incoming(Take take, std::uint64_t order = 0) : PassNode(order), take(std::move(take)) {}
  void run(torch::autograd::variable_list gradients, GradientSink&) override { take(std::move(gradients)); }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    throw std::logic_error("only a GraphPass runs this node");
  }
  Take take;
};

/// The same values as `sent`, with `node` as their history.
inline at::Tensor received(const at::Tensor& sent, const NodePtrTo<Incoming>& node) {
  at::Tensor tensor = sent.detach().clone();
  torch::autograd::create_gradient_edge(tensor, node);
  return tensor;
}

struct CountingPostHook : torch::autograd::FunctionPostHook {
  explicit CountingPostHook(int& calls) : calls(calls) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    ++calls;
    return outputs;
  }
  int& calls;
};

struct ScalingPreHook : torch::autograd::FunctionPreHook {
  explicit ScalingPreHook(double factor) : factor(factor) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    torch::autograd::variable_list scaled;
    for (const at::Tensor& gradient : gradients)
      scaled.push_back(gradient.defined() ? gradient * factor : gradient);
    return scaled;
  }
  double factor;
};

/// Identity whose backward throws.
struct Thrower : torch::autograd::Function<Thrower> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("the thrower threw");
  }
};

/// x + y, whose backward gives y no gradient.
struct Forgetter : torch::autograd::Function<Forgetter> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor& y) {
    return x + y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

/// (sin x, cos x), whose backward takes missing gradients as they are.
struct Pair : torch::autograd::Function<Pair> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& x) {
    context->save_for_backward({x});
    context->set_materialize_grads(false);
    return {x.sin(), x.cos()};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    at::Tensor sum;
    if (gradients[0].defined()) sum = gradients[0] * x.cos();
    if (gradients[1].defined()) sum = sum.defined() ? sum - gradients[1] * x.sin() : -gradients[1] * x.sin();
    return {sum};
  }
};

/// tanh(x W), recomputed in backward by LibTorch's own engine: a checkpoint.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor body(const at::Tensor& x, const at::Tensor& weight) { return x.matmul(weight).tanh(); }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return body(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::AutoGradMode grad_mode(true);
    const at::Tensor x = saved[0].detach().requires_grad_(), weight = saved[1].detach().requires_grad_();
    body(x, weight).backward(gradients[0]);
    return {x.grad(), weight.grad()};
  }
};

}  // namespace torchspan::engine::testing
