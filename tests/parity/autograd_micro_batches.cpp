// Several losses in one context, with all forward passes first: each pass visits only its own graph.
#include "tests/parity/autograd_slow.h"

namespace torchspan::autograd_micro_batches {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

/// Runs on worker 1.
struct BatchLayer {
  explicit BatchLayer(std::int64_t seed) : weight(Kind(false).make(static_cast<std::uint64_t>(seed))) {}
  at::Tensor forward(const at::Tensor& x) const { return (x * weight).tanh(); }
  at::Tensor weight;
};
constexpr Class<BatchLayer, std::int64_t> kBatchLayer{"BatchLayer"};
constexpr Function<&BatchLayer::forward> kForward{"BatchLayer.forward"};
at::Tensor gradient_of(Worker& worker, const RRef<BatchLayer>& layer) {
  return autograd::current(worker).gradient(layer.local_value().weight);
}
constexpr Function<gradient_of> kGradientOf{"gradient_of"};
/// The number of calls of the weight's hook is the number of times its gradient was complete.
std::int64_t hook(const RRef<BatchLayer>& layer, const RRef<std::int64_t>& calls) {
  std::int64_t* count = &calls.local_value();
  return layer.local_value().weight.register_hook([count](const at::Tensor& gradient) {
    ++*count;
    return gradient;
  });
}
constexpr Function<hook> kHook{"hook"};
std::int64_t zero() { return 0; }
constexpr Function<zero> kZero{"zero"};
std::int64_t counted(Worker& worker) {
  return static_cast<std::int64_t>(worker.runtime().metrics.snapshot()["autograd.counted_nodes"]);
}
constexpr Function<counted> kCounted{"counted"};

ClusterOptions world() {
  return autograd_world(2, FunctionTable().add(kBatchLayer, kForward, kGradientOf, kHook, kZero, kCounted));
}

/// One loss over a parameter here and one there.
at::Tensor loss_of(const RRef<BatchLayer>& layer, const at::Tensor& mine, int batch) {
  const at::Tensor x = Kind(false).make(100 + static_cast<std::uint64_t>(batch), false);
  return (layer.rpc_sync(kForward, x * mine) * mine).sum();
}

/// The counts of each of `batches` passes, on worker 0 and on worker 1.
std::vector<std::pair<std::int64_t, std::int64_t>> costs(Worker& worker, int batches, unsigned threads) {
  std::vector<std::pair<std::int64_t, std::int64_t>> costs;
  const auto layer = worker.remote("worker1", kBatchLayer, 7);
  const auto calls = worker.remote("worker1", kZero);
  worker.rpc_sync("worker1", kHook, layer, calls);
  const at::Tensor mine = Kind(false).make(8);
  const at::Tensor weight = BatchLayer(7).weight, copy = Kind(false).make(8);
  Context context(worker);
  Tensors losses;
  for (int batch = 0; batch < batches; ++batch) losses.push_back(loss_of(layer, mine, batch));
  for (int batch = 0; batch < batches; ++batch) {
    const std::int64_t here = counted(worker), there = worker.rpc_sync("worker1", kCounted);
    context.backward(losses[static_cast<std::size_t>(batch)], {.threads = threads});
    costs.emplace_back(counted(worker) - here, worker.rpc_sync("worker1", kCounted) - there);
    const at::Tensor x = Kind(false).make(100 + static_cast<std::uint64_t>(batch), false);
    ((x * copy * weight).tanh() * copy).sum().backward();
    expect_equal(context.gradient(mine), copy.grad());
    expect_equal(layer.rpc_sync(kGradientOf), weight.grad());
    EXPECT_EQ(calls.to_here(), batch + 1) << "the hook is called once per pass, with the whole gradient";
  }
  return costs;
}

TEST(AutogradMicroBatches, APassCountsItsOwnPart) {
  for (const unsigned threads : {1U, 3U}) {
    on_first(world(), [threads](Worker& worker) {
      const auto few = costs(worker, 4, threads), many = costs(worker, 40, threads);
      for (std::size_t pass = 1; pass < many.size(); ++pass) {
        EXPECT_EQ(many[pass], few[1]) << "pass " << pass;
      }
      EXPECT_LE(many[0].first, few[0].first * 10)
          << "the first pass counts the nodes of all forward passes, once";
      EXPECT_LE(many[0].second, few[0].second * 10);
      EXPECT_GT(few[1].first, 3);
      EXPECT_LT(few[1].first, 12) << "a handful of nodes and two messages";
      EXPECT_LT(few[1].second, 12);
    });
  }
}

/// A retained graph is not counted again.
TEST(AutogradMicroBatches, PassesOverOneGraphCountItOnce) {
  on_first(world(), [](Worker& worker) {
    const auto layer = worker.remote("worker1", kBatchLayer, 7);
    const at::Tensor mine = Kind(false).make(8);
    Context context(worker);
    const at::Tensor loss = loss_of(layer, mine, 1);
    std::vector<std::int64_t> costs;
    for (int pass = 0; pass < 4; ++pass) {
      const std::int64_t before = worker.rpc_sync("worker1", kCounted);
      context.backward(loss, {.retain_graph = true});
      costs.push_back(worker.rpc_sync("worker1", kCounted) - before);
    }
    EXPECT_LT(costs[1], costs[0]);
    EXPECT_EQ(costs[1], costs[3]);
  });
}

/// Each step starts from the last one's value, in one context; each has a separate loss.
TEST(AutogradMicroBatches, LossesAlongOneChain) {
  on_first(world(), [](Worker& worker) {
    const auto layer = worker.remote("worker1", kBatchLayer, 7);
    const at::Tensor mine = Kind(false).make(8);
    const at::Tensor weight = BatchLayer(7).weight, copy = Kind(false).make(8);
    Context context(worker);
    at::Tensor far = mine, near = copy;
    Tensors far_losses, near_losses;
    for (int step = 0; step < 12; ++step) {
      far = layer.rpc_sync(kForward, far) + mine;
      near = (near * weight).tanh() + copy;
      far_losses.push_back(far.sum());
      near_losses.push_back(near.sum());
    }
    for (const std::size_t step : {5UL, 0UL, 11UL, 3UL}) {
      context.backward(far_losses[step], {.retain_graph = true});
      near_losses[step].backward({}, true);
      expect_equal(context.gradient(mine), copy.grad());
      expect_equal(layer.rpc_sync(kGradientOf), weight.grad());
    }
  });
}

}  // namespace
}  // namespace torchspan::autograd_micro_batches
