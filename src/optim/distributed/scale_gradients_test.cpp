// GradScaler with the gradients of a context, which are on several owners.
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <optional>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim.h>

#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::optim::scale_gradients_test {
namespace {

using autograd::Context;
using testing::ClusterOptions;
using ::testing::HasSubstr;
using testing::SimCluster;
using torchspan::testing::invalid_text;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor times(const RRef<at::Tensor>& factor, const at::Tensor& x) { return x * factor.local_value(); }
at::Tensor make_factor(double value) { return at::full({1}, value, at::kDouble).set_requires_grad(true); }
constexpr Function<times> kTimes{"times"};
constexpr Function<make_factor> kMakeFactor{"make_factor"};

/// Factors on two workers and one here; the gradient of each is the product of the others and of the input.
struct Chain {
  explicit Chain(Worker& worker)
      : first(worker.remote("worker1", kMakeFactor, 2.0)),
        second(worker.remote("worker2", kMakeFactor, 3.0)),
        here(make_factor(5)) {}
  at::Tensor loss(double input) const {
    const at::Tensor x = at::full({1}, input, at::kDouble);
    return (second.rpc_sync(kTimes, first.rpc_sync(kTimes, x)) * here).sum();
  }
  std::vector<double> values() const {
    return {first.to_here().item<double>(), second.to_here().item<double>(), here.item<double>()};
  }
  RRef<at::Tensor> first, second;
  at::Tensor here;
};

void on_first(const std::function<void(Worker&)>& body) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ClusterOptions options;
    options.workers = 3;
    options.seed = seed;
    options.functions.add(kTimes, kMakeFactor);
    options.extensions = [] {
      std::vector<std::unique_ptr<rpc::Extension>> extensions;
      extensions.push_back(std::make_unique<autograd::AutogradExtension>());
      extensions.push_back(std::make_unique<OptimExtension>());
      return extensions;
    };
    SimCluster(options).run([&](Worker& worker) {
      if (worker.rank() == 0) body(worker);
    });
  }
}

TEST(ScaleGradients, StepsAllOwnersWithUnscaledGradients) {
  on_first([](Worker& worker) {
    const Chain chain(worker);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.01}, {chain.first, chain.second, chain.here});
    GradScaler scaler({.init_scale = 1024, .growth_interval = 1});
    Context context(worker);
    context.backward(scaler.scale(chain.loss(1)));
    EXPECT_TRUE(scaler.step(optimizer, context));
    scaler.update();
    EXPECT_EQ(context.gradient(chain.here).item<double>(), 6 * 1024) << "the context is unchanged";
    EXPECT_THAT(chain.values(), ::testing::Pointwise(::testing::DoubleNear(1e-12), {1.85, 2.9, 4.94}));
    EXPECT_EQ(scaler.get_scale(), 2048);
  });
}

TEST(ScaleGradients, StepsNoOwnerIfOneHasAnInfiniteGradient) {
  on_first([](Worker& worker) {
    const Chain chain(worker);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.01}, {chain.first, chain.second, chain.here});
    GradScaler scaler({.init_scale = 8});
    {
      Context context(worker);
      context.backward(scaler.scale(chain.loss(kInfinity)));
      EXPECT_FALSE(scaler.step(optimizer, context));
      EXPECT_THAT(invalid_text([&] { scaler.step(optimizer, context); }), HasSubstr("already called"));
      scaler.update();
    }
    EXPECT_THAT(chain.values(), ::testing::ElementsAre(2, 3, 5));
    EXPECT_EQ(scaler.get_scale(), 4);
    Context context(worker);
    context.backward(scaler.scale(chain.loss(1)));
    EXPECT_TRUE(scaler.step(optimizer, context));
    EXPECT_THAT(chain.values(), ::testing::Pointwise(::testing::DoubleNear(1e-12), {1.85, 2.9, 4.94}));
  });
}

TEST(ScaleGradients, LetsClippingMeasureUnscaledGradients) {
  on_first([](Worker& worker) {
    const Chain chain(worker);
    DistributedOptimizer optimizer(worker, SGD{.lr = 1}, {chain.first, chain.second, chain.here});
    GradScaler scaler({.init_scale = 128});
    Context context(worker);
    context.backward(scaler.scale(chain.loss(1)));
    scaler.unscale_(optimizer, context);
    const double norm = std::sqrt(15.0 * 15 + 10 * 10 + 6 * 6);
    EXPECT_NEAR(optimizer.clip_grad_norm(context, 1), norm, 1e-9);
    EXPECT_TRUE(scaler.step(optimizer, context));
    EXPECT_THAT(chain.values(), ::testing::Pointwise(::testing::DoubleNear(1e-6),
                                                     {2 - 15 / norm, 3 - 10 / norm, 5 - 6 / norm}));
  });
}

TEST(ScaleGradients, KeepsTheFactorOfEachContextUntilItsStep) {
  on_first([](Worker& worker) {
    const Chain chain(worker);
    DistributedOptimizer optimizer(worker, SGD{.lr = 1}, {chain.first, chain.second, chain.here});
    const double norm = std::sqrt(15.0 * 15 + 10 * 10 + 6 * 6);
    Context first(worker);
    const at::Tensor loss = chain.loss(1);
    first.backward(loss);
    EXPECT_NEAR(optimizer.clip_grad_norm(first, 1), norm, 1e-9);
    worker.runtime().executor.spawn("second", [&] {
      Context second(worker);
      second.backward(chain.loss(1));
      EXPECT_NEAR(optimizer.clip_grad_norm(second, 0.5), norm, 1e-9);
      optimizer.step(second);
    });
    optimizer.step(first);
    EXPECT_THAT(chain.values(),
                ::testing::Pointwise(::testing::DoubleNear(1e-6),
                                     {2 - 1.5 * 15 / norm, 3 - 1.5 * 10 / norm, 5 - 1.5 * 6 / norm}));
  });
}

TEST(ScaleGradients, RefusesAStepWithAnotherContextThanUnscale) {
  on_first([](Worker& worker) {
    const Chain chain(worker);
    DistributedOptimizer optimizer(worker, SGD{.lr = 1}, {chain.here});
    GradScaler scaler({.init_scale = 8});
    Context first(worker);
    first.backward(scaler.scale(chain.loss(1)));
    scaler.unscale_(optimizer, first);
    worker.runtime().executor.spawn("second", [&] {
      Context second(worker);
      second.backward(scaler.scale(chain.loss(1)));
      EXPECT_THAT(invalid_text([&] { scaler.step(optimizer, second); }),
                  HasSubstr("another autograd context"));
    });
    EXPECT_TRUE(scaler.step(optimizer, first));
  });
}

TEST(ScaleGradients, RefusesGradientsThatAreSteppedInBackward) {
  on_first([](Worker& worker) {
    const Chain chain(worker);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.01}, {chain.first, chain.second, chain.here});
    GradScaler scaler({.init_scale = 8});
    {
      Context context(worker);
      optimizer.step_in_backward(context);
      EXPECT_THAT(invalid_text([&] { scaler.step(optimizer, context); }), HasSubstr("step_in_backward()"));
      EXPECT_THAT(invalid_text([&] { optimizer.clip_grad_norm(context, 1); }),
                  HasSubstr("step_in_backward()"));
      scaler.update();
    }
    EXPECT_EQ(scaler.get_scale(), 8) << "a failed unscale_() keeps it";
    Context context(worker);
    context.backward(scaler.scale(chain.loss(1)));
    EXPECT_TRUE(scaler.step(optimizer, context));
  });
}

/// Unlike that of a local optimizer, it has changed nothing.
TEST(ScaleGradients, MayBeRepeatedAfterAFailure) {
  on_first([](Worker& worker) {
    const Chain chain(worker);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.01}, {chain.first, chain.second, chain.here});
    GradScaler scaler({.init_scale = 8});
    std::optional<Context> ended(std::in_place, worker);
    const autograd::ContextView old = *ended;
    ended.reset();
    Context context(worker);
    context.backward(scaler.scale(chain.loss(1)));
    EXPECT_ANY_THROW(scaler.unscale_(optimizer, old));
    EXPECT_TRUE(scaler.step(optimizer, context));
    scaler.update();
    EXPECT_THAT(chain.values(), ::testing::Pointwise(::testing::DoubleNear(1e-12), {1.85, 2.9, 4.94}));
  });
}

TEST(ScaleGradients, RejectsFactorsThatMakeNoSense) {
  on_first([](Worker& worker) {
    const Chain chain(worker);
    DistributedOptimizer optimizer(worker, SGD{.lr = 1}, {chain.here});
    Context context(worker);
    for (const double factor : {0.0, -1.0, kInfinity, std::nan("")}) {
      EXPECT_THAT(invalid_text([&] { optimizer.scale_gradients(context, factor); }), HasSubstr("factor = "));
    }
  });
}

}  // namespace
}  // namespace torchspan::optim::scale_gradients_test
