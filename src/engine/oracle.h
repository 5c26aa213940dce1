#pragma once
#include <functional>
#include <gtest/gtest.h>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/detail/engine/gradient_sink.h>

#include "tests/support/local_backward.h"

namespace torchspan::engine::testing {

using at::Tensor;

/// Builds a graph from leaves and returns its roots; run twice, it must build the same graph.
using Program = std::function<std::vector<Tensor>(const std::vector<Tensor>& leaves)>;

inline std::vector<Tensor> as_leaves(const std::vector<Tensor>& values) {
  std::vector<Tensor> leaves;
  for (const Tensor& value : values) leaves.push_back(value.detach().clone().requires_grad_());
  return leaves;
}

/// A gradient for a root that differs in every element.
inline Tensor gradient_for(const Tensor& root) {
  return (at::arange(root.numel(), at::kDouble).reshape(root.sizes()) + 1).div(7).to(root.dtype());
}

inline std::vector<Tensor> gradients_for(const std::vector<Tensor>& roots) {
  std::vector<Tensor> gradients;
  for (const Tensor& root : roots) gradients.push_back(gradient_for(root));
  return gradients;
}

/// The same tensor bit for bit, in layout and strides too.
inline void expect_identical(const Tensor& ours, const Tensor& stock) {
  ASSERT_EQ(ours.defined(), stock.defined());
  if (!stock.defined()) return;
  ASSERT_EQ(ours.layout(), stock.layout());
  ASSERT_EQ(ours.scalar_type(), stock.scalar_type());
  ASSERT_EQ(ours.sizes(), stock.sizes());
  if (stock.is_sparse()) {
    const Tensor a = ours.coalesce(), b = stock.coalesce();
    EXPECT_TRUE(at::equal(a.indices(), b.indices()));
    EXPECT_TRUE(at::equal(a.values(), b.values())) << a << "\nagainst\n" << b;
  } else {
    EXPECT_EQ(ours.strides(), stock.strides());
    EXPECT_TRUE(at::equal(ours, stock)) << ours << "\nagainst\n" << stock;
  }
}

/// Checks that GraphPasses over `program` give each leaf the gradient that LibTorch's engine gives it, and no
/// gradient to the leaves that get none there.
inline void expect_as_stock(const std::vector<Tensor>& values, const Program& program, int passes = 1) {
  const auto theirs = as_leaves(values), mine = as_leaves(values);
  const auto their_roots = program(theirs), my_roots = program(mine);
  GradientMap gradients;
  for (int pass = 1; pass <= passes; ++pass) {
    const bool retain = pass < passes;
    torch::autograd::backward(their_roots, gradients_for(their_roots), retain);
    MapSink sink(gradients);
    backward(my_roots, gradients_for(my_roots), sink, {.retain_graph = retain});
  }
  for (std::size_t leaf = 0; leaf < values.size(); ++leaf) {
    SCOPED_TRACE(::testing::Message() << "leaf " << leaf);
    expect_identical(gradients.gradient(mine[leaf]), theirs[leaf].grad());
    EXPECT_FALSE(mine[leaf].grad().defined());
  }
}

}  // namespace torchspan::engine::testing
