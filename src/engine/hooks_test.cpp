#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include "engine/oracle.h"
#include "engine/test_nodes.h"

namespace torchspan::engine::hooks_test {
namespace {

using namespace testing;
using torch::autograd::impl::grad_accumulator;

Tensor leaf(std::vector<int64_t> sizes = {3}) {
  torch::manual_seed(11);
  return at::randn(sizes).requires_grad_();
}

TEST(Hooks, OfLeavesAndInnerTensorsChangeWhatFlowsAsInTheStockEngine) {
  expect_as_stock({at::randn({3}), at::randn({3})}, [](auto& x) {
    x[0].register_hook([](const Tensor& gradient) { return gradient * 2; });
    x[0].register_hook([](const Tensor& gradient) { return gradient + 1; });
    Tensor y = x[0] * x[1];
    y.register_hook([](const Tensor& gradient) { return gradient * gradient; });
    return std::vector<Tensor>{y.sin() + y};
  });
}

TEST(Hooks, OfALeafRunOncePerPassOnTheSum) {
  const Tensor x = leaf();
  int calls = 0;
  Tensor seen;
  x.register_hook([&](const Tensor& gradient) {
    ++calls;
    seen = gradient.clone();
  });
  GradientMap gradients;
  MapSink sink(gradients);
  backward({(x * 2 + x * 3).sum()}, {}, sink);
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(seen, at::full({3}, 5.0)));
}

TEST(Hooks, OfAccumulateGradRunOnceEachWithoutItBeingApplied) {
  const Tensor x = leaf();
  int calls = 0;
  const auto node = grad_accumulator(x);
  node->add_pre_hook(std::make_unique<ScalingPreHook>(3));
  node->add_post_hook(std::make_unique<CountingPostHook>(calls));
  node->add_post_hook(std::make_unique<CountingPostHook>(calls));
  GradientMap gradients;
  MapSink sink(gradients);
  backward({(x + x * 4).sum()}, {}, sink);
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({3}, 15.0)));
  EXPECT_FALSE(x.grad().defined());
}

TEST(Hooks, OfANodeSeeItsInputsAndChangeItsOutputs) {
  struct Doubler : torch::autograd::FunctionPostHook {
    explicit Doubler(Tensor& seen) : seen(seen) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list& inputs) override {
      seen = inputs.at(0);
      return {outputs.at(0) * 2};
    }
    Tensor& seen;
  };
  const Tensor x = leaf();
  Tensor y = x.sin(), seen;
  y.grad_fn()->add_post_hook(std::make_unique<Doubler>(seen));
  GradientMap gradients;
  MapSink sink(gradients);
  backward({(y * 5).sum()}, {}, sink);
  EXPECT_TRUE(at::equal(seen, at::full({3}, 5.0)));
  EXPECT_TRUE(at::allclose(gradients.gradient(x), x.detach().cos() * 10));
}

TEST(Hooks, ThatRetainGradFillInnerGradsOnly) {
  const Tensor x = leaf();
  Tensor y = x * 2;
  y.retain_grad();
  GradientMap gradients;
  MapSink sink(gradients);
  backward({(y * 3).sum()}, {}, sink);
  EXPECT_TRUE(at::equal(y.grad(), at::full({3}, 3.0)));
  EXPECT_FALSE(x.grad().defined());
}

TEST(Hooks, ThatKeepAGradientNeverSeeItChangeLater) {
  const Tensor x = leaf();
  std::vector<Tensor> kept;
  x.register_hook([&](const Tensor& gradient) { kept.push_back(gradient); });
  GradientMap gradients;
  for (int pass = 0; pass < 3; ++pass) {
    MapSink sink(gradients);
    backward({(x * 2).sum()}, {}, sink);
  }
  ASSERT_EQ(kept.size(), 3u);
  for (const Tensor& gradient : kept) EXPECT_TRUE(at::equal(gradient, at::full({3}, 2.0)));
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({3}, 6.0)));
}

TEST(Hooks, ThatThrowFailThePassInTheirNode) {
  const Tensor x = leaf();
  x.register_hook([](const Tensor&) { throw std::runtime_error("the hook threw"); });
  GradientMap gradients;
  MapSink sink(gradients);
  try {
    backward({x.sum()}, {}, sink);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("AccumulateGrad"), std::string::npos) << error.what();
    EXPECT_NE(error.message().find("the hook threw"), std::string::npos) << error.what();
  }
}

TEST(Hooks, RunInTheOrderOfTheStockEngine) {
  const auto order = [](bool ours) {
    std::vector<int> seen;
    const Tensor a = leaf(), b = leaf(), early = b * 2;
    std::vector<Tensor> inner{a * b, a.sin(), b.cos(), a + b};
    for (int i = 0; i < 4; ++i) inner[i].register_hook([&seen, i](const Tensor&) { seen.push_back(i); });
    a.register_hook([&seen](const Tensor&) { seen.push_back(10); });
    b.register_hook([&seen](const Tensor&) { seen.push_back(11); });
    // b is used once more, before all: it is ready after a.
    const Tensor loss = ((inner[2] * inner[0] + inner[1] * inner[3]) * early).sum();
    if (ours) {
      GradientMap gradients;
      MapSink sink(gradients);
      backward({loss}, {}, sink);
    } else {
      loss.backward();
    }
    return seen;
  };
  EXPECT_EQ(order(true), order(false));
}

/// One node represents all tensors that arrived in one message.
TEST(Hooks, OfATensorThatThePassDoesNotReachAreNotCalled) {
  for (const unsigned used : {0U, 1U, 2U}) {
    std::vector<Tensor> values{leaf(), leaf(), leaf()}, given;
    const auto node =
        make_node<Incoming>([&](torch::autograd::variable_list gradients) { given = std::move(gradients); });
    std::vector<int> calls(3);
    int passed = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      values[i] = received(values[i], node);
      values[i].retain_grad();
      values[i].register_hook([&calls, i](const Tensor& gradient) {
        ++calls[i];
        return gradient * 2;
      });
    }
    node->add_pre_hook(std::make_unique<ScalingPreHook>(5));
    node->add_post_hook(std::make_unique<CountingPostHook>(passed));
    GradientMap gradients;
    MapSink sink(gradients);
    backward({values[used].sum()}, {}, sink);
    ASSERT_EQ(given.size(), 3U);
    for (unsigned i = 0; i < 3; ++i) {
      EXPECT_EQ(calls[i], i == used ? 1 : 0);
      EXPECT_EQ(given[i].defined(), i == used);
      EXPECT_EQ(values[i].grad().defined(), i == used);
    }
    EXPECT_TRUE(at::equal(given[used], at::full({3}, 10.0)));
    EXPECT_EQ(passed, 1);
  }
}

TEST(Hooks, OfWhatLeavesTheProcessRunFirst) {
  const Tensor x = leaf();
  std::vector<std::string> order;
  const auto noting = [&order](const char* name) {
    return [&order, name](torch::autograd::variable_list) { order.emplace_back(name); };
  };
  const Tensor first = received(x, make_node<Incoming>(noting("first"), 1));
  const Tensor second = received(x, make_node<Incoming>(noting("second"), 2));
  const Tensor local = x * 2;
  local.register_hook([&order](const Tensor&) { order.emplace_back("local"); });
  x.register_hook([&order](const Tensor&) { order.emplace_back("leaf"); });
  GradientMap gradients;
  MapSink sink(gradients);
  backward({at::stack({first, local, second}).sum()}, {}, sink);
  EXPECT_EQ(order, (std::vector<std::string>{"second", "first", "local", "leaf"}));
}

}  // namespace
}  // namespace torchspan::engine::hooks_test
