#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>
#include <random>

#include <torch/torch.h>

#include <torchspan/pipeline.h>

#include "core/api/sim_executor.h"
#include "tests/support/errors.h"
#include "tests/support/pipeline_world.h"

namespace torchspan::pipeline::balance_test {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torchspan::testing::invalid_text;
using torchspan::testing::on_workers;

double bottleneck(const std::vector<double>& costs, const std::vector<int>& parts) {
  double worst = 0;
  std::size_t next = 0;
  for (const int part : parts) {
    double sum = 0;
    for (int i = 0; i < part; ++i) sum += costs[next++];
    worst = std::max(worst, sum);
  }
  EXPECT_EQ(next, costs.size());
  return worst;
}

/// The smallest bottleneck among all cuts, by exhaustive search.
double best_by_trying(const std::vector<double>& costs, std::size_t first, int parts) {
  if (parts == 1)
    return std::accumulate(costs.begin() + static_cast<std::ptrdiff_t>(first), costs.end(), 0.0);
  double best = std::numeric_limits<double>::infinity(), sum = 0;
  for (std::size_t end = first + 1; end + static_cast<std::size_t>(parts) - 1 <= costs.size(); ++end) {
    sum += costs[end - 1];
    best = std::min(best, std::max(sum, best_by_trying(costs, end, parts - 1)));
  }
  return best;
}

// peer suite: pipe test_balance `blockpartition*`: better: the exact minimum, compared with exhaustive search
TEST(BalanceCosts, FindTheLeastBottleneckOfRandomCosts) {
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    std::mt19937_64 random(seed);
    const auto items = static_cast<std::size_t>(1 + random() % 11);
    const int parts = 1 + static_cast<int>(random() % items);
    std::vector<double> costs;
    // Heavy tails, equal ones and zeros.
    for (std::size_t i = 0; i < items; ++i) {
      const double uniform = static_cast<double>(random() % 1000) / 1000;
      costs.push_back(seed % 3 == 0 ? std::floor(uniform * 3) : std::exp(4 * uniform));
    }
    const auto balance = balance_costs(costs, parts);
    ASSERT_EQ(balance.size(), static_cast<std::size_t>(parts)) << "seed " << seed;
    for (const int part : balance) EXPECT_GE(part, 1) << "seed " << seed;
    const double best = best_by_trying(costs, 0, parts);
    EXPECT_NEAR(bottleneck(costs, balance), best, 1e-9 * (1 + best)) << "seed " << seed;
  }
}

// The peer's test_blockpartition, and the heavy ends where its search stops too early.
TEST(BalanceCosts, SolveThePeersCases) {
  EXPECT_THAT(balance_costs({1, 2, 3, 4, 5, 6}, 2), ElementsAre(4, 2));
  EXPECT_THAT(balance_costs({0, 0}, 2), ElementsAre(1, 1));
  EXPECT_THAT(balance_costs({9, 1, 1, 1, 1, 1, 1, 9}, 4), ElementsAre(1, 3, 3, 1));
}

TEST(BalanceCosts, MakeThePartsEvenWhereTheBottleneckLeavesAChoice) {
  EXPECT_THAT(balance_costs({10, 1, 1, 1, 1}, 3), ElementsAre(1, 2, 2));
  EXPECT_THAT(balance_costs({1, 1, 1, 1, 10}, 3), ElementsAre(2, 2, 1));
  EXPECT_THAT(balance_costs({1, 1, 1, 1, 1, 1}, 3), ElementsAre(2, 2, 2));
}

TEST(BalanceCosts, RefuseWhatCannotBeCut) {
  EXPECT_THAT(invalid_text([] { balance_costs({1, 2}, 0); }), HasSubstr("parts is 0"));
  EXPECT_THAT(invalid_text([] { balance_costs({1, 2}, -1); }), HasSubstr("parts is -1"));
  EXPECT_THAT(invalid_text([] { balance_costs({1}, 2); }), HasSubstr("1 layers do not fill 2 stages"));
  EXPECT_THAT(invalid_text([] { balance_costs({1, -2}, 1); }), HasSubstr("the cost of layer 1 is -2"));
  EXPECT_THAT(invalid_text([] { balance_costs({std::nan(""), 2}, 1); }), HasSubstr("layer 0"));
  EXPECT_THAT(invalid_text([] { balance_costs({std::numeric_limits<double>::infinity()}, 1); }),
              HasSubstr("layer 0"));
}

/// A layer whose forward and backward take set times on the executor's clock.
struct SlowFunction : torch::autograd::Function<SlowFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t executor, std::int64_t backward) {
    context->saved_data["executor"] = executor;
    context->saved_data["backward"] = backward;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* executor = reinterpret_cast<Executor*>(context->saved_data["executor"].toInt());
    executor->sleep(milliseconds(context->saved_data["backward"].toInt()));
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

struct SlowImpl : torch::nn::Module {
  SlowImpl(Executor* on, int forwards, int backwards)
      : executor(on), forward_ms(forwards), backward_ms(backwards) {
    weight = register_parameter("weight", at::ones({4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    executor->sleep(milliseconds(forward_ms));
    // The first call is slower, as on real machines.
    if (calls++ == 0) executor->sleep(milliseconds(50));
    return SlowFunction::apply(x * weight, reinterpret_cast<std::int64_t>(executor), backward_ms);
  }
  Executor* executor;
  int forward_ms, backward_ms, calls = 0;
  at::Tensor weight;
};
TORCH_MODULE(Slow);

void simulated(const std::function<void(Executor&)>& body) {
  SimExecutor executor(1);
  executor.run([&] { body(executor); });
}

// peer: pipe balance_by_time
TEST(Profile, MeasuresForwardsAndBackwardsAndTakesTheFastest) {
  simulated([](Executor& executor) {
    Layers layers;
    layers.add<Slow>(&executor, 3, 7);
    layers.add<Slow>(&executor, 5, 1);
    const auto costs = profile(executor, layers, at::ones({2, 4}));
    ASSERT_EQ(costs.size(), 2u);
    EXPECT_NEAR(costs[0].forward_seconds, 0.003, 1e-6);
    EXPECT_NEAR(costs[0].backward_seconds, 0.007, 1e-6);
    EXPECT_NEAR(costs[1].forward_seconds, 0.005, 1e-6);
    EXPECT_NEAR(costs[1].backward_seconds, 0.001, 1e-6);
    const auto once = profile(executor, layers, at::ones({2, 4}), {.repeats = 1});
    EXPECT_NEAR(once[0].forward_seconds, 0.053, 1e-6) << "one repeat cannot tell the first call from others";
  });
}

TEST(Profile, CountsAllUsesOfALayer) {
  simulated([](Executor& executor) {
    Layers layers;
    const auto slow = layers.add<Slow>(&executor, 3, 7);
    layers.reuse(slow);
    layers.reuse(slow);
    const auto costs = profile(executor, layers, at::ones({2, 4}));
    EXPECT_NEAR(costs[0].forward_seconds, 3 * 0.003, 1e-6);
    EXPECT_NEAR(costs[0].backward_seconds, 3 * 0.007, 1e-6);
    EXPECT_EQ(costs[0].parameter_bytes, 4 * 4) << "its parameters are there once";
    EXPECT_EQ(costs[0].activation_bytes, 3 * 2 * 4 * 4);
  });
}

// peer: pipe balance_by_time, balance_by_time_loop_resets_input, balance_by_time_tuple: same: on a
//   simulated clock
TEST(Profile, CountsWhatGraphsKeepByTheLayerThatComputedIt) {
  simulated([](Executor& executor) {
    Layers layers;
    layers.add<torch::nn::Linear>(4, 8);  // its output is kept by the next layer
    layers.add_function("gelu", [](const at::Tensor& x) { return at::gelu(x); });
    layers.add_function("plus one", [](const at::Tensor& x) { return x + 1; });  // keeps nothing
    layers.add<torch::nn::Linear>(8, 2);
    const auto costs = profile(executor, layers, at::ones({10, 4}));
    ASSERT_EQ(costs.size(), 4u);
    EXPECT_EQ(costs[0].kept_bytes, 10 * 8 * 4);
    EXPECT_EQ(costs[1].kept_bytes, 0);
    EXPECT_EQ(costs[2].kept_bytes, 10 * 8 * 4);
    EXPECT_EQ(costs[3].kept_bytes, 0);
  });
}

TEST(Profile, BalancesByTime) {
  on_workers(1, 1, [](Worker& worker) {
    Executor* executor = &worker.runtime().executor;
    Layers layers;
    for (const int time : {1, 2, 3, 4, 5, 6}) layers.add<Slow>(executor, time, 2 * time);
    EXPECT_THAT(balance_by_time(worker, layers, 2, at::ones({2, 4})), ElementsAre(4, 2));
    Layers reversed;
    for (const int time : {6, 5, 4, 3, 2, 1}) reversed.add<Slow>(executor, time, 2 * time);
    EXPECT_THAT(balance_by_time(worker, reversed, 2, at::ones({2, 4})), ElementsAre(2, 4));
  });
}

TEST(Profile, MeasuresOnOneWorkerForAll) {
  std::vector<std::vector<int>> balances(3);
  on_workers(3, 1, [&](Worker& worker) {
    // The layers take different times on different workers, and only the first worker has a sample.
    const bool measures = worker.rank() == 1;
    Layers layers;
    for (const int time : {1, 2, 3, 4, 5, 6})
      layers.add<Slow>(&worker.runtime().executor, measures ? time : 7 - time, 1);
    const Batch sample = measures ? Batch(at::ones({2, 4})) : Batch();
    if (worker.rank() == 0) return;
    auto& mine = balances[static_cast<std::size_t>(worker.rank())];
    mine = balance_by_time(worker, layers, 2, sample, {.workers = {"worker1", "worker2"}});
    EXPECT_THAT(balance_by_size(worker, layers, 2, sample, 2, {.workers = {"worker1", "worker2"}}),
                ElementsAre(3, 3));
  });
  EXPECT_THAT(balances[1], ElementsAre(4, 2));
  EXPECT_EQ(balances[2], balances[1]);
}

TEST(Profile, NamesTheLayerThatTheSampleDoesNotFitOnAllWorkers) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add<torch::nn::Linear>(4, 2).named("first");
    layers.add<torch::nn::Linear>(3, 2).named("second");
    EXPECT_THAT(invalid_text([&] {
                  balance_by_time(worker, layers, 2, at::ones({2, 4}));
                }),
                HasSubstr("layer 'second' failed with the sample"));
  });
}

struct WideImpl : torch::nn::Module {
  explicit WideImpl(std::int64_t times) : times(times) {}
  at::Tensor forward(const at::Tensor& x) { return x.repeat({1, times}); }
  std::int64_t times;
};
TORCH_MODULE(Wide);

// peer: pipe balance_by_size_latent, _param, _param_scale, _tuple: same: in bytes, without CUDA
TEST(Profile, BalancesByActivations) {
  on_workers(1, 1, [](Worker& worker) {
    Layers layers;
    for (const int times : {2, 1, 1, 1, 1, 1}) layers.add<Wide>(times);
    const auto costs = profile(worker.runtime().executor, layers, at::ones({3, 5}));
    for (const LayerCost& cost : costs) EXPECT_EQ(cost.activation_bytes, 3 * 10 * 4);
    EXPECT_THAT(balance_by_size(worker, layers, 3, at::ones({3, 5})), ElementsAre(2, 2, 2));
    Layers widening;
    for (const int times : {2, 2, 2, 2, 2, 2}) widening.add<Wide>(times);
    EXPECT_THAT(balance_by_size(worker, widening, 2, at::ones({3, 5})), ElementsAre(5, 1));
  });
}

// peer: pipe balance_by_size_latent
TEST(Profile, BalancesByParametersAsMuchAsTheyAreScaled) {
  on_workers(1, 1, [](Worker& worker) {
    Layers layers;  // 100 parameters and 10 outputs, then three layers of 300 outputs
    layers.add<torch::nn::Linear>(torch::nn::LinearOptions(10, 10).bias(false));
    layers.add<Wide>(30);
    layers.add_function("a", [](const at::Tensor& x) { return x + 1; });
    layers.add_function("b", [](const at::Tensor& x) { return x + 1; });
    const at::Tensor sample = at::ones({1, 10});
    EXPECT_EQ(profile(worker.runtime().executor, layers, sample)[0].parameter_bytes, 400);
    EXPECT_THAT(balance_by_size(worker, layers, 2, sample, 0), ElementsAre(2, 2));
    EXPECT_THAT(balance_by_size(worker, layers, 2, sample, 20), ElementsAre(1, 3));
  });
}

// peer: pipe balance_by_time
TEST(Profile, HandlesTuplesNumbersEmptyValuesAndSkips) {
  simulated([](Executor& executor) {
    Layers layers;
    layers
        .add_function("fork",
                      [](const at::Tensor& x, Skips& skips) {
                        skips.stash("s", x * 2);
                        return std::make_tuple(x, x > 0, std::int64_t{3}, std::optional<at::Tensor>());
                      })
        .stashes("s");
    layers
        .add_function("join",
                      [](const at::Tensor& x, const at::Tensor& mask, std::int64_t by,
                         const std::optional<at::Tensor>& nothing, Skips& skips) {
                        EXPECT_FALSE(nothing);
                        return x * mask * by + skips.pop("s");
                      })
        .pops("s");
    const auto costs = profile(executor, layers, at::ones({2, 3}));
    EXPECT_EQ(costs[0].activation_bytes, 2 * 3 * 4 + 2 * 3);
    EXPECT_EQ(costs[1].activation_bytes, 2 * 3 * 4);
  });
}

TEST(Profile, TakesInputsThatHaveNoGradient) {
  simulated([](Executor& executor) {
    Layers layers;
    layers.add<torch::nn::Embedding>(5, 4);
    layers.add<torch::nn::Linear>(4, 4);
    EXPECT_EQ(profile(executor, layers, at::tensor({1, 2, 3})).size(), 2u);
  });
}

// peer: pipe balance_by_time
TEST(Profile, RunsEveryRepeatOnTheSameInput) {
  simulated([](Executor& executor) {
    std::vector<double> seen;
    Layers layers;
    layers.add_function("in place", [&seen](const at::Tensor& x) {
      seen.push_back(x.sum().item<double>());
      return x * 2;
    });
    const at::Tensor sample = at::ones({2, 2}).set_requires_grad(true);
    profile(executor, layers, sample);
    EXPECT_THAT(seen, ElementsAre(4, 4, 4, 4)) << "three for the time, one for the memory";
    EXPECT_FALSE(sample.grad().defined());
  });
}

TEST(Profile, RunsLayersThatChangeTheirInputInPlace) {
  simulated([](Executor& executor) {
    std::vector<double> seen;
    Layers layers;
    layers.add_function("first", [&seen](at::Tensor x) {
      seen.push_back(x.sum().item<double>());
      return x.add_(1);
    });
    layers.add<torch::nn::Linear>(4, 4);
    layers.add<torch::nn::ReLU>(torch::nn::ReLUOptions(true));
    layers.add<torch::nn::Linear>(4, 2);
    const at::Tensor sample = at::ones({2, 4});
    const auto costs = profile(executor, layers, sample);
    ASSERT_EQ(costs.size(), 4u);
    EXPECT_EQ(costs[2].activation_bytes, 2 * 4 * 4);
    EXPECT_THAT(seen, ElementsAre(8, 8, 8, 8));
    EXPECT_TRUE(sample.equal(at::ones({2, 4})));
  });
}

/// Counts its forwards in a buffer, so that the test sees whether a profile leaves a trace.
struct MarkedImpl : torch::nn::Module {
  MarkedImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    dropout = register_module("dropout", torch::nn::Dropout(0.5));
    weight = register_parameter("weight", at::ones({3}));
  }
  at::Tensor forward(const at::Tensor& x) {
    was_training = norm->is_training();
    return dropout->forward(norm->forward(x * weight));
  }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  at::Tensor weight;
  bool was_training = false;
};
TORCH_MODULE(Marked);

// peer: pipe layerwise_sandbox, sandbox_during_profiling, not_training, already_has_grad: better: existing
//   gradients (which the peer rejects) and random states are preserved
TEST(Profile, LeavesModulesAsTheyWere) {
  simulated([](Executor& executor) {
    Marked marked;
    marked->weight.mutable_grad() = at::full({3}, 5.0);
    const at::Tensor gradient = marked->weight.grad();
    marked->norm->running_mean.fill_(2);
    Layers layers;
    layers.add_existing(marked);
    torch::manual_seed(7);
    profile(executor, layers, at::ones({4, 3}));
    EXPECT_TRUE(marked->was_training);
    EXPECT_TRUE(marked->weight.grad().is_same(gradient)) << "the very same tensor";
    EXPECT_TRUE(gradient.equal(at::full({3}, 5.0)));
    EXPECT_FALSE(marked->norm->weight.grad().defined());
    EXPECT_TRUE(marked->norm->running_mean.equal(at::full({3}, 2.0)));
    EXPECT_EQ(marked->norm->num_batches_tracked.item<std::int64_t>(), 0);
    EXPECT_TRUE(marked->weight.equal(at::ones({3})));
    const at::Tensor drawn = at::rand({3});
    torch::manual_seed(7);
    EXPECT_TRUE(drawn.equal(at::rand({3}))) << "the next numbers are those that would have come";
  });
}

// peer: pipe layerwise_sandbox
TEST(Profile, RunsModulesInTheirOwnMode) {
  simulated([](Executor& executor) {
    Marked marked;
    marked->eval();
    Layers layers;
    layers.add_existing(marked);
    const torch::NoGradGuard guard;
    profile(executor, layers, at::ones({4, 3}));
    EXPECT_FALSE(marked->was_training);
    EXPECT_FALSE(marked->is_training());
    EXPECT_FALSE(marked->norm->is_training());
    EXPECT_FALSE(torch::GradMode::is_enabled());
  });
}

TEST(Profile, NamesTheLayerThatTheSampleDoesNotFit) {
  simulated([](Executor& executor) {
    Layers layers;
    layers.add<torch::nn::Linear>(4, 2).named("first");
    layers.add<torch::nn::Linear>(3, 2).named("second");
    const std::string text = invalid_text([&] { profile(executor, layers, at::ones({2, 4})); });
    EXPECT_THAT(text, HasSubstr("layer 'second' failed with the sample"));
    EXPECT_THAT(invalid_text([&] {
                  profile(executor, layers, at::ones({2, 4}), {.repeats = 0});
                }),
                HasSubstr("repeats"));
  });
}

}  // namespace
}  // namespace torchspan::pipeline::balance_test
