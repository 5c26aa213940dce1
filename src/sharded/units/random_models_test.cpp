// Random models, divided into random units, against the same computation in one process.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <random>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/units/test_models.h"
#include "tests/support/environment.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::random_models_test {
namespace {

using testing::kWidth;
using testing::LayerSpec;
using testing::RandomNet;
using torchspan::testing::number_from;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

struct Pass {
  std::vector<std::size_t> skipped = {};  ///< layers
  bool synchronize = true;
  bool twice = false;   ///< two forwards, one backward
  bool retain = false;  ///< two backward passes through one graph
};
struct Step {
  std::vector<Pass> passes;
  bool clips = false;
  bool evaluates = false;
};

struct Case {
  int size = 1;
  bool adam = false;
  FullyShardedOptions options = {};
  std::vector<LayerSpec> layers;
  std::vector<Step> steps;

  explicit Case(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto chance = [&](int in) { return random() % static_cast<unsigned>(in) == 0; };
    size = 1 + static_cast<int>(random() % 4);
    adam = chance(2);
    options.reshard_after_forward = !chance(3);
    options.prefetch = !chance(3);
    constexpr std::size_t kSizes[] = {0, 41, 200, std::size_t{1} << 20};  // bytes; a weight has 200
    options.alone_bytes = kSizes[random() % 4];
    options.overlap_bytes = kSizes[random() % 4];
    constexpr int kShardRanks[][3] = {{0, 1, 1}, {0, 1, 2}, {0, 1, 3}, {1, 2, 4}};
    if (chance(3)) options.shard_ranks = kShardRanks[size - 1][random() % 3];
    for (std::size_t i = 0, count = 1 + random() % 5; i < count; ++i) {
      LayerSpec spec;
      spec.kind = static_cast<int>(random() % (i > 0 ? 4 : 3));
      spec.unit = !chance(3);
      spec.inner_unit = chance(2);
      spec.recompute = chance(4);
      spec.frozen_bias = chance(4);
      spec.earlier = i > 0 ? random() % i : 0;
      layers.push_back(spec);
    }
    for (std::size_t i = 0, count = 1 + random() % 3; i < count; ++i) {
      Step step;
      step.clips = chance(3);
      step.evaluates = chance(4);
      for (std::size_t k = 0, passes = 1 + random() % 3; k < passes; ++k) {
        Pass pass;
        pass.synchronize = k + 1 == passes || chance(2);
        pass.twice = chance(4);
        pass.retain = chance(6);
        for (std::size_t layer = 0; layer < layers.size(); ++layer) {
          if (chance(5)) pass.skipped.push_back(layer);
        }
        step.passes.push_back(std::move(pass));
      }
      steps.push_back(std::move(step));
    }
    options.mapped_bytes = chance(2) ? 1 : 0;
  }
};

at::Tensor input(int rank, std::size_t step, std::size_t pass) {
  return testing::values({3, kWidth},
                         rank * 1.7 + static_cast<double>(step) + 0.3 * static_cast<double>(pass))
      .requires_grad_();
}

/// Runs one pass of one rank.
template <class Model>
void run(Model& model, const Pass& pass, const at::Tensor& x, double factor) {
  at::Tensor loss = model(x, pass.skipped).pow(2).sum() * factor;
  if (pass.twice) loss = loss + model(x * 0.5, std::vector<std::size_t>{}).sum() * factor;
  if (pass.retain) loss.backward({}, /*retain_graph=*/true);
  loss.backward();
}

std::unique_ptr<optim::Optimizer> optimizer_of(const Case& one, const RandomNet& net) {
  if (one.adam) return std::make_unique<optim::Optimizer>(*net, optim::Adam({.lr = 0.01}));
  return std::make_unique<optim::Optimizer>(*net, optim::SGD({.lr = 0.05, .momentum = 0.9}));
}

RandomNet alone(const Case& one) {
  RandomNet net(one.layers);
  const auto optimizer = optimizer_of(one, net);
  const auto model = [&](const at::Tensor& x, const std::vector<std::size_t>& skipped) {
    return net->forward(x, skipped);
  };
  for (std::size_t s = 0; s < one.steps.size(); ++s) {
    for (std::size_t p = 0; p < one.steps[s].passes.size(); ++p) {
      for (int rank = 0; rank < one.size; ++rank)
        run(model, one.steps[s].passes[p], input(rank, s, p), 1.0 / one.size);
    }
    if (one.steps[s].clips) optimizer->clip_grad_norm(0.5);
    optimizer->step();
    optimizer->zero_grad();
  }
  return net;
}

void check(const Case& one) {
  const RandomNet wanted = alone(one);
  const auto expected = wanted->named_parameters();
  on_ranks(one.size, [&](const Rank& self) {
    RandomNet net(one.layers);
    FullyShardedDataParallel<RandomNet> model(net, self.group, one.options);
    const auto optimizer = optimizer_of(one, net);
    for (std::size_t s = 0; s < one.steps.size(); ++s) {
      for (std::size_t p = 0; p < one.steps[s].passes.size(); ++p) {
        const Pass& pass = one.steps[s].passes[p];
        const at::Tensor x = input(self.rank, s, p);
        if (pass.synchronize) {
          run(model, pass, x, 1);
        } else {
          const auto local = model.no_sync();
          run(model, pass, x, 1);
        }
      }
      if (one.steps[s].evaluates) {
        const at::NoGradGuard no_grad;
        model(input(self.rank, s, 0), std::vector<std::size_t>{});
      }
      if (one.steps[s].clips) model.clip_grad_norm(0.5);
      optimizer->step();
      optimizer->zero_grad();
    }
    model.with_full_parameters([&] {
      for (const auto& item : net->named_parameters()) {
        EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 1e-9, 1e-11))
            << item.key() << " on rank " << self.rank << "\n"
            << item.value() << "\nagainst\n"
            << expected[item.key()];
      }
    });
  });
}

// peer: fsdp test_train_parity_with_activation_checkpointing: same
// peer: fsdp test_multi_forward_module: same
// peer: fsdp test_multi_forward_mixed_requires_grad: same
// peer: fsdp test_raise_scalar_parameter: better: scalars are divided, too
// peer: fsdp test_gradient_accumulation: same
// peer: fsdp test_train_mixed_requires_grad_per_group, test_train_mixed_requires_grad_across_groups: same
// peer: fsdp test_manual_reshard_with_reshard_after_forward_false: same
// peer: fsdp test_clip_grad_norm_1d: same
// peer: fsdp test_unused_forward_module: same
TEST(RandomModels, TrainAsInOneProcess) {
  const long cases = number_from("TORCHSPAN_CASES", 20), first = number_from("TORCHSPAN_SEED", 1);
  for (long seed = first; seed < first + cases; ++seed) {
    SCOPED_TRACE(fmt::format("TORCHSPAN_SEED={} TORCHSPAN_CASES=1", seed));
    check(Case(static_cast<std::uint64_t>(seed)));
    ASSERT_FALSE(::testing::Test::HasFailure());
  }
}

// A parameter of the root is used by a layer that is computed again, after its segment was reduced.
TEST(RandomModels, ASumThatGrowsAfterItsReductionIsReducedAgain) { check(Case(928)); }

}  // namespace
}  // namespace torchspan::sharded::random_models_test
