// Passes through a part of a graph whose edges were counted.
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include "engine/api/graph_walk.h"
#include "engine/oracle.h"
#include "engine/test_nodes.h"

namespace torchspan::engine::edge_counts_test {
namespace {

using namespace testing;

Tensor leaf() { return at::ones({2}).requires_grad_(); }
NodePtrTo<Outgoing> outgoing(const Tensor& tensor) {
  return make_node<Outgoing>(std::vector<Tensor>{tensor});
}

TEST(EdgeCounts, WalksEachNodeOnceAndCountsAllEdges) {
  const Tensor x = leaf(), shared = x * 2;
  const auto first = outgoing(shared.sin()), second = outgoing(shared.cos());
  EdgeCounts counts;
  EXPECT_EQ(counts.add(first), 4U) << "the send, the sine, the product, the leaf";
  EXPECT_EQ(counts.find(*shared.grad_fn())->edges, 1U);
  EXPECT_EQ(counts.add(second), 2U) << "what they share is known";
  EXPECT_EQ(counts.find(*shared.grad_fn())->edges, 2U);
  EXPECT_EQ(counts.find(*first)->edges, 0U);
  EXPECT_LT(counts.find(*first)->order, counts.find(*second)->order);
  EXPECT_FALSE(counts.find(*(x * 3).grad_fn()));
  EXPECT_EQ(counts.size(), 6U);
}

TEST(EdgeCounts, KeepsNoNodeAliveAndForgetsThoseThatEnded) {
  const Tensor x = leaf();
  EdgeCounts counts;
  for (int i = 0; i < 5000; ++i) {
    const auto send = outgoing(x * 2);
    EXPECT_GE(counts.add(send), 2U) << "a node where another one was is a new one";
    EXPECT_EQ(counts.find(*send->next_edge(0).function)->edges, 1U);
    EXPECT_EQ(send.use_count(), 1);
  }
  EXPECT_LT(counts.size(), 2100U);
}

struct Holder : TensorNode {
  explicit Holder(Tensor tensor) : held(std::move(tensor)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  void release_variables() override { held.reset(); }
  Tensor held;
};

TEST(EdgeCounts, KeepsNoTensorOfANodeThatEnded) {
  const Tensor x = leaf(), factor = at::full({2}, 3.0);
  const std::size_t before = factor.storage().use_count();
  EdgeCounts counts;
  {
    Tensor held = at::zeros({2});
    const auto holder = make_node<Holder>(factor.detach());
    holder->add_next_edge(torch::autograd::impl::gradient_edge(x));
    torch::autograd::create_gradient_edge(held, holder);
    const auto send = outgoing(Pair::apply(x * factor)[0] + held);
    EXPECT_EQ(counts.add(send), 6U) << "the send, the sum, the sine, the product, the holder, the leaf";
    EXPECT_GT(factor.storage().use_count(), before);
  }
  EXPECT_EQ(factor.storage().use_count(), before);
  EXPECT_EQ(counts.size(), 6U);
}

/// Two sends that share a product and a leaf, and a third one that shares the leaf.
class PartialPass : public ::testing::TestWithParam<unsigned> {
 protected:
  PartialPass() {
    for (const auto& send : {first, second, third}) counts->add(send);
  }
  std::unique_ptr<GraphPass> begin() {
    PassOptions options;
    options.retain_graph = true;
    options.counts = counts;
    options.threads = GetParam();
    options.enlist = [](UniqueFunction<void()> help) { help(); };
    sink = std::make_unique<MapSink>(gradients);
    return std::make_unique<GraphPass>(*sink, options);
  }
  static void deliver(GraphPass& pass, const NodePtrTo<Outgoing>& send) {
    pass.add_pending(send);
    EXPECT_TRUE(pass.deliver(*send, {at::ones({2})}));
    pass.run();
  }
  void expect_gradient(double value) {
    EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({2}, value))) << gradients.gradient(x);
  }

  const Tensor x = leaf(), shared = x * 2;
  const NodePtrTo<Outgoing> first = outgoing(shared * 3), second = outgoing(shared * 5),
                            third = outgoing(x * 7);
  const std::shared_ptr<EdgeCounts> counts = std::make_shared<EdgeCounts>();
  GradientMap gradients;
  std::unique_ptr<MapSink> sink;
};
INSTANTIATE_TEST_SUITE_P(Threads, PartialPass, ::testing::Values(1U, 3U));

TEST_P(PartialPass, RunsWhatTheRootsReachAndNoMore) {
  const auto pass = begin();
  pass->prepare();
  EXPECT_EQ(pass->report().nodes, 0U);
  deliver(*pass, first);
  EXPECT_EQ(pass->report().nodes, 4U) << "nothing of the other sends";
  EXPECT_EQ(pass->report().executed, 2U) << "the product waits for the second send";
  EXPECT_TRUE(pass->seal());
  EXPECT_FALSE(pass->seal());
  pass->run();
  EXPECT_TRUE(pass->finished());
  expect_gradient(6);
}

TEST_P(PartialPass, WaitsForRootsThatAreAddedLater) {
  const auto pass = begin();
  pass->prepare();
  deliver(*pass, first);
  deliver(*pass, second);
  EXPECT_EQ(pass->report().executed, 5U) << "both ways to the product have come, not both to the leaf";
  pass->add_pending(third);
  pass->seal();
  pass->run();
  EXPECT_FALSE(pass->finished());
  EXPECT_EQ(pass->report().waiting_for.size(), 1U);
  deliver(*pass, third);
  EXPECT_TRUE(pass->finished());
  expect_gradient(6 + 10 + 7);
}

TEST_P(PartialPass, CountsEdgesOfAnUncountedLocalRoot) {
  const auto pass = begin();
  pass->add_root((shared * 11).sum());
  pass->prepare();
  pass->run();
  EXPECT_FALSE(gradients.gradient(x).defined());
  deliver(*pass, third);
  EXPECT_FALSE(gradients.gradient(x).defined()) << "the other two may come";
  pass->seal();
  pass->run();
  EXPECT_TRUE(pass->finished());
  expect_gradient(22 + 7);
}

TEST_P(PartialPass, IsRepeated) {
  for (const double expected : {6.0, 12.0, 18.0}) {
    const auto pass = begin();
    pass->prepare();
    deliver(*pass, first);
    pass->seal();
    pass->run();
    ASSERT_TRUE(pass->finished());
    expect_gradient(expected);
  }
}

TEST_P(PartialPass, TakesNoRootsOnceItIsSealed) {
  const auto pass = begin();
  pass->prepare();
  pass->add_pending(first);
  pass->add_pending(first);
  pass->seal();
  EXPECT_NO_THROW(pass->add_pending(first)) << "it is known";
  EXPECT_THROW(pass->add_pending(second), Error);
  EXPECT_TRUE(pass->deliver(*first, Delivery{{at::Tensor()}, {false}})) << "nothing reached it";
  pass->run();
  EXPECT_TRUE(pass->finished());
  EXPECT_FALSE(gradients.gradient(x).defined());
}

}  // namespace
}  // namespace torchspan::engine::edge_counts_test
