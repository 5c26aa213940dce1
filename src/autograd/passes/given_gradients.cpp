#include "autograd/passes/given_gradients.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <utility>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>

#include "engine/api/node_ptr.h"

namespace torchspan::autograd {
namespace {

using torch::autograd::variable_list;

/// Keeps the gradients, because the pass may be run again.
class GivenGradients final : public torch::autograd::Node {
 public:
  GivenGradients(torch::autograd::edge_list roots, variable_list gradients)
      : Node(std::move(roots)), gradients_(std::move(gradients)) {}
  variable_list apply(variable_list&&) override { return gradients_; }
  std::string name() const override { return "GivenGradients"; }

 private:
  const variable_list gradients_;
};

at::Tensor fitted(std::size_t index, const at::Tensor& root, const at::Tensor& gradient) {
  check_root(index, root);
  if (!gradient.defined()) {
    if (root.numel() == 1) return at::ones(root.sizes(), root.options().layout(at::kStrided));
    refuse_root(index,
                fmt::format("has {} elements and an undefined gradient, which means 1 for a scalar only",
                            root.numel()));
  }
  if (gradient.sizes() != root.sizes()) {
    refuse_root(index, fmt::format("has the shape [{}], but its gradient [{}]", fmt::join(root.sizes(), ", "),
                                   fmt::join(gradient.sizes(), ", ")));
  }
  if (gradient.device() != root.device()) {
    refuse_root(index, fmt::format("is on device {}, but its gradient on {}", root.device().str(),
                                   gradient.device().str()));
  }
  if (gradient.is_complex() != root.is_complex()) {
    refuse_root(index, fmt::format("is of type {}, but its gradient of type {}",
                                   c10::toString(root.scalar_type()), c10::toString(gradient.scalar_type())));
  }
  return gradient.detach();
}

}  // namespace

void refuse_root(std::size_t index, const std::string& why) {
  throw Error(ErrorKind::kInvalid, fmt::format("backward(): root {} {}", index, why));
}

void check_root(std::size_t index, const at::Tensor& root) {
  if (!root.defined()) refuse_root(index, "is undefined");
  if (!root.requires_grad())
    refuse_root(index, "does not require grad, and neither does any tensor that it was computed from");
}

at::Tensor scalar_of(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients) {
  if (roots.empty()) throw Error(ErrorKind::kInvalid, "backward() got no root; pass it the loss");
  if (gradients.size() != roots.size()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("backward() got {} gradients for {} roots; pass one for each root",
                            gradients.size(), roots.size()));
  }
  torch::autograd::edge_list edges;
  variable_list given;
  for (std::size_t i = 0; i < roots.size(); ++i) {
    given.push_back(fitted(i, roots[i], gradients[i]));
    edges.push_back(torch::autograd::impl::gradient_edge(roots[i]));
  }
  at::Tensor scalar = at::zeros({});
  torch::autograd::set_history(scalar, engine::make_node<GivenGradients>(std::move(edges), std::move(given)));
  return scalar;
}

}  // namespace torchspan::autograd
