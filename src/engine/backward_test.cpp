#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include "engine/api/graph_walk.h"
#include "engine/oracle.h"
#include "engine/test_nodes.h"

namespace torchspan::engine::backward_test {
namespace {

using namespace testing;

std::vector<Tensor> matrices(int count, at::ScalarType type = at::kFloat) {
  torch::manual_seed(7);
  std::vector<Tensor> values;
  for (int i = 0; i < count; ++i) values.push_back(at::randn({3, 3}, type));
  return values;
}

TEST(Backward, OfAChainEqualsTheStockEngine) {
  expect_as_stock(matrices(1), [](auto& x) {
    Tensor y = x[0];
    for (int i = 0; i < 50; ++i) y = (y * 1.01).tanh();
    return std::vector<Tensor>{y};
  });
}

TEST(Backward, OfDiamondsEqualsTheStockEngine) {
  expect_as_stock(matrices(2), [](auto& x) {
    Tensor y = x[0] * x[1];
    for (int i = 0; i < 6; ++i) y = y.sin() + y.cos() * y;
    return std::vector<Tensor>{y};
  });
}

TEST(Backward, OfASharedParameterSumsItsUses) {
  expect_as_stock(matrices(2), [](auto& x) {
    return std::vector<Tensor>{x[0].matmul(x[1]).tanh().matmul(x[1]).matmul(x[1].t()).sum()};
  });
}

TEST(Backward, OfSeveralRootsOneBehindTheOtherEqualsTheStockEngine) {
  expect_as_stock(matrices(2), [](auto& x) {
    Tensor y = x[0] * x[1], z = y.exp();
    return std::vector<Tensor>{z.sum(), y, x[1].sum(), y};
  });
}

TEST(Backward, FromALeafGivesItTheRootsGradient) {
  expect_as_stock(matrices(1), [](auto& x) { return std::vector<Tensor>{x[0]}; });
}

TEST(Backward, LeavesUnusedOutputsUndefined) {
  expect_as_stock(matrices(2), [](auto& x) {
    auto parts = x[0].unbind(0);
    auto pair = Pair::apply(x[1]);
    return std::vector<Tensor>{parts[1].exp(), pair[1]};
  });
}

TEST(Backward, GivesNothingToALeafWithAnUndefinedGradient) {
  expect_as_stock(matrices(3), [](auto& x) {
    return std::vector<Tensor>{Forgetter::apply(x[0], x[1].sin()) * x[2].detach()};
  });
}

TEST(Backward, ThroughViewsAndInPlaceChangesEqualsTheStockEngine) {
  expect_as_stock(matrices(2), [](auto& x) {
    Tensor y = x[0] * 2;
    y.mul_(x[1]);
    y.select(0, 1).add_(x[1].select(1, 0));
    y.view({9}).narrow(0, 2, 4).mul_(3);
    return std::vector<Tensor>{y.t().reshape({9}), y.as_strided({2, 2}, {3, 1})};
  });
}

TEST(Backward, KeepsSparseEmbeddingGradientsSparse) {
  const Tensor rows = torch::tensor({1, 2, 1, 0});
  expect_as_stock({at::randn({5, 3})}, [&](auto& x) {
    return std::vector<Tensor>{at::embedding(x[0], rows, -1, false, /*sparse=*/true).sin()};
  });
}

TEST(Backward, AddsSparseAndDenseGradientsInEitherOrder) {
  const Tensor rows = torch::tensor({1, 2, 1, 0}), other = torch::tensor({4, 1});
  const auto lookup = [](const Tensor& weight, const Tensor& index) {
    return at::embedding(weight, index, -1, false, /*sparse=*/true);
  };
  for (int order = 0; order < 4; ++order) {
    SCOPED_TRACE(order);
    expect_as_stock({at::randn({5, 3})}, [&](auto& x) {
      Tensor sum = at::zeros({});
      if (order & 1) sum = sum + (x[0] * x[0]).sum();
      sum = sum + lookup(x[0], rows).sum();
      if (order & 2) sum = sum + x[0].exp().sum();
      return std::vector<Tensor>{sum + lookup(x[0], other).sin().sum()};
    });
  }
}

TEST(Backward, SparseThenDenseAcrossPassesBecomesDense) {
  const Tensor rows = torch::tensor({1, 2, 1, 0});
  const Tensor value = at::randn({5, 3});
  for (bool sparse_first : {true, false}) {
    const Tensor mine = as_leaves({value})[0], theirs = as_leaves({value})[0];
    GradientMap gradients;
    for (bool sparse : {sparse_first, !sparse_first, sparse_first}) {
      const auto loss = [&](const Tensor& w) {
        return sparse ? at::embedding(w, rows, -1, false, true).sin().sum() : w.cos().sum();
      };
      loss(theirs).backward();
      MapSink sink(gradients);
      backward({loss(mine)}, {}, sink);
    }
    expect_identical(gradients.gradient(mine), theirs.grad());
  }
}

TEST(Backward, CastsGradientsToTheTypeOfTheInput) {
  expect_as_stock({at::randn({3}), at::randn({3}, at::kDouble), at::randn({3}, at::kHalf)}, [](auto& x) {
    return std::vector<Tensor>{x[0] * x[1] + x[2].to(at::kFloat), (x[1] * 2).to(at::kFloat).sum()};
  });
}

TEST(Backward, HandlesComplexNumbersBesideRealOnes) {
  expect_as_stock({at::randn({3}, at::kComplexFloat), at::randn({3})}, [](auto& x) {
    return std::vector<Tensor>{at::real(x[0] * x[1]), at::abs(x[0] * x[0])};
  });
}

TEST(Backward, ReducesBroadcastShapes) {
  expect_as_stock({at::randn({3, 1}), at::randn({4}), at::randn({})}, [](auto& x) {
    return std::vector<Tensor>{x[0] * x[1] + x[2], x[2].expand({2, 2})};
  });
}

TEST(Backward, WithRetainedGraphTwiceIsTheSum) {
  expect_as_stock(
      matrices(2), [](auto& x) { return std::vector<Tensor>{(x[0].matmul(x[1])).exp().sum()}; },
      /*passes=*/3);
}

TEST(Backward, TwiceWithoutRetainingIsReported) {
  const auto x = as_leaves(matrices(1));
  const Tensor loss = x[0].exp().sum();
  GradientMap gradients;
  MapSink first(gradients), second(gradients);
  backward({loss}, {}, first);
  try {
    backward({loss}, {}, second);
    FAIL() << "the graph's buffers were freed, yet it ran";
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("second time"), std::string::npos) << error.what();
    EXPECT_NE(error.message().find("ExpBackward0"), std::string::npos) << error.what();
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  }
}

TEST(Backward, RunsANodeThatUsesTheStockEngineInside) {
  expect_as_stock(matrices(2), [](auto& x) {
    return std::vector<Tensor>{Recomputed::apply(Recomputed::apply(x[0], x[1]), x[1]).sum()};
  });
}

TEST(Backward, InsideAStockPassThatComputesOnlySomeGradientsIsRefused) {
  struct Nested : torch::autograd::Function<Nested> {
    static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      const at::AutoGradMode grad_mode(true);
      const Tensor inner = gradients[0].detach().requires_grad_();
      GradientMap map;
      MapSink sink(map);
      engine::backward({inner.exp().sum()}, {}, sink);
      return {map.gradient(inner)};
    }
  };
  const auto x = as_leaves(matrices(1));
  EXPECT_NO_THROW(Nested::apply(x[0]).sum().backward());
  EXPECT_TRUE(at::equal(x[0].grad(), at::ones({3, 3}).exp()));
  try {
    torch::autograd::grad({Nested::apply(x[0]).sum()}, {x[0]});
    FAIL() << "edges were cut silently";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  }
}

TEST(Backward, RunsNodesWithGradModeOffUnderTheStateOfItsMaker) {
  const auto x = as_leaves(matrices(1));
  std::vector<bool> seen;
  const Tensor y = x[0] * 2;
  y.register_hook([&](const Tensor&) {
    seen.push_back(at::GradMode::is_enabled());
    seen.push_back(c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::Functionalize));
  });
  GradientMap gradients;
  MapSink sink(gradients);
  std::optional<GraphPass> pass;
  {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::Functionalize);
    pass.emplace(sink);
  }
  pass->add_root(y.sum());
  pass->prepare();
  const bool before = c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::Functionalize);
  pass->run();
  EXPECT_EQ(seen, (std::vector<bool>{false, true}));
  EXPECT_FALSE(before);
  EXPECT_TRUE(at::GradMode::is_enabled());
  EXPECT_FALSE(c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::Functionalize));
}

TEST(Backward, ThatFailsNamesTheNodeAndLeavesThePassFailed) {
  const auto x = as_leaves(matrices(2));
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  pass.add_root((Thrower::apply(x[0]) * x[1]).sum());
  pass.prepare();
  pass.run();
  EXPECT_TRUE(pass.failed());
  EXPECT_FALSE(pass.finished());
  EXPECT_NE(pass.failed_node().find("Thrower"), std::string::npos);
  EXPECT_THROW(std::rethrow_exception(pass.cause()), std::runtime_error);
  const std::string text = to_error(pass.error()).message();
  EXPECT_NE(text.find("Thrower"), std::string::npos) << text;
  EXPECT_NE(text.find("the thrower threw"), std::string::npos) << text;
  EXPECT_THROW(sink.end()->wait(), Error);
  EXPECT_FALSE(gradients.gradient(x[0]).defined());
}

TEST(Backward, RefusesRootsThatCannotBeDifferentiated) {
  GradientMap gradients;
  MapSink sink(gradients);
  const auto x = as_leaves(matrices(1));
  EXPECT_THROW(backward({at::ones({})}, {}, sink), Error);
  EXPECT_THROW(backward({x[0] * 2}, {}, sink), Error);
  EXPECT_THROW(backward({x[0] * 2, x[0]}, {at::ones({3, 3})}, sink), Error);
  EXPECT_THROW(backward({x[0] * 2}, {at::ones({4, 3})}, sink), Error);
  EXPECT_THROW(backward({x[0] * 2}, {at::ones({3, 3}, at::kComplexFloat)}, sink), Error);
  EXPECT_EQ(gradients.size(), 0U);
}

TEST(Backward, OfAnEmptyListDoesNothing) {
  GradientMap gradients;
  MapSink sink(gradients);
  backward({}, {}, sink);
  EXPECT_EQ(gradients.size(), 0U);
  EXPECT_TRUE(sink.end()->has_arrived());
}

TEST(Backward, FindsNansUnderAnomalyDetection) {
  const torch::autograd::DetectAnomalyGuard guard;
  const Tensor x = at::zeros({2}).requires_grad_();
  GradientMap gradients;
  MapSink sink(gradients);
  try {
    backward({(x.sqrt() * 0).sum()}, {}, sink);
    FAIL() << "0 / 0 went unnoticed";
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("nan"), std::string::npos) << error.what();
    EXPECT_NE(error.message().find("SqrtBackward0"), std::string::npos) << error.what();
  }
}

TEST(Backward, OfAVeryLongChainNeedsNoDeepStack) {
  const Tensor x = at::ones({1}).requires_grad_();
  Tensor y = x;
  for (int i = 0; i < 200000; ++i) y = y + 0;
  GradientMap gradients;
  MapSink sink(gradients);
  backward({y}, {}, sink);
  EXPECT_EQ(gradients.gradient(x).item<float>(), 1);
}

TEST(LeafTensors, AreThoseReachedOnceEachInOrderOfDiscovery) {
  const auto x = as_leaves(matrices(4));
  const Tensor y = x[2].matmul(x[0]) + x[2];
  const auto leaves = leaf_tensors({y.sum(), x[3], y * x[0].detach()});
  std::vector<const void*> found;
  for (const Tensor& leaf : leaves) found.push_back(leaf.unsafeGetTensorImpl());
  const auto id = [](const Tensor& tensor) { return static_cast<const void*>(tensor.unsafeGetTensorImpl()); };
  EXPECT_EQ(found, (std::vector<const void*>{id(x[3]), id(x[2]), id(x[0])}));
  EXPECT_TRUE(leaf_tensors({at::ones({2})}).empty());
}

}  // namespace
}  // namespace torchspan::engine::backward_test
