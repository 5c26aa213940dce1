#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <torchspan/detail/autograd/extension.h>

#include "tests/support/cluster.h"

namespace torchspan::passes_test {
namespace {

using autograd::AutogradExtension;
using autograd::Context;
using testing::ClusterOptions;
using ::testing::HasSubstr;
using testing::SimCluster;

/// A layer whose parameter is on its owner.
struct Layer {
  explicit Layer(std::int64_t seed) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    weight = torch::randn({4, 4}, torch::kDouble).set_requires_grad(true);
  }
  at::Tensor forward(const at::Tensor& x) const { return torch::tanh(torch::matmul(x, weight)); }
  at::Tensor weight;
};
at::Tensor weight_of(const RRef<Layer>& layer) { return layer.local_value().weight.detach(); }
at::Tensor gradient_of(Worker& worker, const RRef<Layer>& layer) {
  return autograd::current(worker).gradient(layer.local_value().weight);
}
at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
std::vector<at::Tensor> split(const at::Tensor& x) { return {x * 2, x * 3}; }
/// Calls the caller back for the inner product: A -> B -> A.
at::Tensor there_and_back(Worker& worker, const at::Tensor& a, const at::Tensor& b);
Task<at::Tensor> later(Worker& worker, at::Tensor a, at::Tensor b);
at::Tensor broken_backward(const at::Tensor& x);
std::int64_t contexts(Worker& worker) {
  return static_cast<std::int64_t>(worker.extension<AutogradExtension>().counts().contexts);
}
bool in_context(std::int64_t) { return autograd::has_current(); }

constexpr Class<Layer, std::int64_t> kLayer{"Layer"};
constexpr Function<&Layer::forward> kForward{"Layer.forward"};
constexpr Function<weight_of> kWeightOf{"weight_of"};
constexpr Function<gradient_of> kGradientOf{"gradient_of"};
constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<split> kSplit{"split"};
constexpr Function<there_and_back> kThereAndBack{"there_and_back"};
constexpr Function<later> kLater{"later"};
constexpr Function<broken_backward> kBroken{"broken_backward"};
constexpr Function<contexts> kContexts{"contexts"};
constexpr Function<in_context> kInContext{"in_context"};

at::Tensor there_and_back(Worker& worker, const at::Tensor& a, const at::Tensor& b) {
  return worker.rpc_sync(0, kMultiply, a + 1, b) + a;
}

Task<at::Tensor> later(Worker& worker, at::Tensor a, at::Tensor b) {
  at::Tensor product = co_await worker.rpc_async((worker.rank() + 1) % worker.world_size(), kMultiply, a, b);
  co_return product + a;
}

struct Broken : torch::autograd::Function<Broken> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("the backward of Broken is broken");
  }
};
at::Tensor broken_backward(const at::Tensor& x) { return Broken::apply(x); }

ClusterOptions cluster(int workers, std::uint64_t seed) {
  ClusterOptions options;
  options.workers = workers;
  options.seed = seed;
  options.functions.add(kLayer, kForward, kWeightOf, kGradientOf, kMultiply, kSplit, kThereAndBack, kLater,
                        kBroken, kContexts, kInContext);
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<AutogradExtension>());
    return extensions;
  };
  return options;
}

void on_first(int workers, std::uint64_t seed, const std::function<void(Worker&)>& body) {
  SimCluster world(cluster(workers, seed));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) body(worker);
  });
}

at::Tensor parameter(std::int64_t seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  return torch::randn({3, 4}, torch::kDouble).set_requires_grad(true);
}

void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_TRUE(actual.defined());
  EXPECT_TRUE(at::allclose(actual, expected, 1e-12, 1e-12)) << actual << expected;
}

TEST(Autograd, GivesTheGradientsOfOneProcessThroughOneCall) {
  on_first(2, 1, [](Worker& worker) {
    at::Tensor a = parameter(1), b = parameter(2);
    Context context(worker);
    context.backward(worker.rpc_sync("worker1", kMultiply, a.sin(), b).sum());
    expect_equal(context.gradient(a), (a.cos() * b).detach());
    expect_equal(context.gradient(b), a.sin().detach());
    EXPECT_FALSE(a.grad().defined());
  });
}

TEST(Autograd, GivesTheGradientsOfOneProcessThroughLayersOnOtherWorkers) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    on_first(3, seed, [](Worker& worker) {
      at::Tensor x = parameter(3);
      auto first = worker.remote("worker1", kLayer, 10);
      auto second = worker.remote("worker2", kLayer, 11);
      at::Tensor w1 = Layer(10).weight, w2 = Layer(11).weight;
      expect_equal(first.rpc_sync(kWeightOf), w1.detach());
      torch::tanh(torch::matmul(torch::tanh(torch::matmul(x, w1)), w2)).pow(2).sum().backward();
      const at::Tensor expected = x.grad().clone();
      x.mutable_grad() = at::Tensor();

      Context context(worker);
      context.backward(second.rpc_sync(kForward, first.rpc_sync(kForward, x)).pow(2).sum());
      expect_equal(context.gradient(x), expected);
      expect_equal(first.rpc_sync(kGradientOf), w1.grad());
      expect_equal(second.rpc_sync(kGradientOf), w2.grad());
    });
  }
}

TEST(Autograd, FollowsCallsBackToTheirCaller) {
  on_first(2, 7, [](Worker& worker) {
    at::Tensor a = parameter(1), b = parameter(2);
    Context context(worker);
    context.backward(worker.rpc_sync("worker1", kThereAndBack, a, b).sum());
    expect_equal(context.gradient(a), (b + 1).detach());
    expect_equal(context.gradient(b), (a + 1).detach());
  });
}

TEST(Autograd, FollowsACoroutineFromThreadToThread) {
  on_first(3, 7, [](Worker& worker) {
    at::Tensor a = parameter(1), b = parameter(2);
    Context context(worker);
    context.backward(worker.rpc_sync("worker1", kLater, a, b).sum());
    expect_equal(context.gradient(a), (b + 1).detach());
    expect_equal(context.gradient(b), a.detach());
  });
}

TEST(Autograd, AccumulatesOverPassesThatRetainTheGraph) {
  on_first(2, 1, [](Worker& worker) {
    at::Tensor a = parameter(1), b = parameter(2);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kMultiply, a, b).sum();
    context.backward(loss, {.retain_graph = true});
    context.backward(loss);
    expect_equal(context.gradient(a), (2 * b).detach());
  });
}

TEST(Autograd, LeavesOutputsThatTheLossDoesNotUseWithoutGradient) {
  on_first(2, 1, [](Worker& worker) {
    at::Tensor a = parameter(1);
    Context context(worker);
    const auto parts = worker.rpc_sync("worker1", kSplit, a);
    context.backward(parts[1].sum());
    expect_equal(context.gradient(a), at::full_like(a, 3.0).detach());
  });
}

TEST(Autograd, RunsOnACallToItself) {
  on_first(1, 1, [](Worker& worker) {
    at::Tensor a = parameter(1), b = parameter(2);
    Context context(worker);
    context.backward(worker.rpc_sync(0, kMultiply, a, b).sum());
    expect_equal(context.gradient(a), b.detach());
  });
}

// peer: test_dist_autograd TestSendFunctionInvalidInputs: differs: send nodes are not public
TEST(Autograd, RefusesTheStockEngineOnAGraphThatSpansWorkers) {
  on_first(2, 1, [](Worker& worker) {
    at::Tensor a = parameter(1);
    Context context(worker);
    at::Tensor loss = worker.rpc_sync("worker1", kMultiply, a, a).sum();
    try {
      loss.backward();
      FAIL() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("use context.backward(loss)"));
    }
  });
}

TEST(Autograd, RefusesRootsThatCannotBeDifferentiated) {
  on_first(1, 1, [](Worker& worker) {
    Context context(worker);
    at::Tensor a = parameter(1);
    for (const at::Tensor& root : {at::Tensor(), at::ones({}), a * 2}) {
      EXPECT_THROW(context.backward(root), Error);
    }
    EXPECT_THROW(context.backward(std::vector<at::Tensor>{}), Error);
    EXPECT_THROW(Context nested(worker), Error);
  });
}

TEST(Autograd, SetsTheContextOfHandlersAndOfNothingElse) {
  on_first(2, 1, [](Worker& worker) {
    EXPECT_FALSE(worker.rpc_sync("worker1", kInContext, 0));
    {
      Context context(worker);
      EXPECT_TRUE(worker.rpc_sync("worker1", kInContext, 0));
    }
    for (int i = 0; i < 20; ++i) EXPECT_FALSE(worker.rpc_sync("worker1", kInContext, 0));
  });
}

TEST(Autograd, DeliversResultsDetachedOutsideAnyContext) {
  on_first(2, 1, [](Worker& worker) {
    at::Tensor a = parameter(1);
    EXPECT_FALSE(worker.rpc_sync("worker1", kMultiply, a, a).requires_grad());
  });
}

TEST(Autograd, ReleasesContextsOnEveryWorkerTheyVisited) {
  SimCluster world(cluster(3, 5));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) {
      at::Tensor a = parameter(1);
      for (int i = 0; i < 10; ++i) {
        Context context(worker);
        context.backward(worker.rpc_sync("worker1", kLater, a, a).sum());
      }
      world.executor().sleep(std::chrono::seconds(1));
      for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(worker.rpc_sync(rank, kContexts), 0) << "rank " << rank;
    }
  });
}

TEST(Autograd, NamesWorkerAndNodeWhenABackwardFails) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    on_first(2, seed, [](Worker& worker) {
      at::Tensor a = parameter(1);
      Context context(worker);
      for (int i = 0; i < 3; ++i) {
        const at::Tensor loss = worker.rpc_sync("worker1", kBroken, a.sin()).sum();
        try {
          context.backward(loss);
          FAIL() << "nothing was thrown";
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure) << error.what();
          EXPECT_THAT(error.what(), HasSubstr("worker1"));
          EXPECT_THAT(error.what(), HasSubstr("Broken"));
        }
      }
    });
  }
}

TEST(Autograd, NamesTheSendThatGotNoGradientInsteadOfHanging) {
  on_first(2, 1, [](Worker& worker) {
    at::Tensor a = parameter(1);
    Context context(worker);
    const at::Tensor used = worker.rpc_sync("worker1", kMultiply, a, a);
    const at::Tensor unused = worker.rpc_sync("worker1", kSplit, a)[0];
    try {
      context.backward(used.sum(), {.mode = autograd::PassMode::kFast, .timeout = std::chrono::seconds(5)});
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
      EXPECT_THAT(error.what(), HasSubstr("worker1"));
    }
  });
}

TEST(Autograd, EndsThePassOnAllWorkersWhenOneDies) {
  ClusterOptions options = cluster(3, 3);
  options.graceful = false;
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() != 0) return world.executor().sleep(std::chrono::seconds(3));
    at::Tensor a = parameter(1);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kLater, a, a).sum();
    const auto before = world.executor().now();
    world.kill(2);
    EXPECT_THROW(context.backward(loss), Error);
    EXPECT_LT(world.executor().now() - before, std::chrono::seconds(1));
  });
}

}  // namespace
}  // namespace torchspan::passes_test
