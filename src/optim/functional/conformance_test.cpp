// Compares every optimizer with LibTorch's of the same name and with closed forms. For a new optimizer add a
// cases struct below and its name to AllOptimizers.
// peer: dist_optimizer_test.py `torch.optim` update rules: same to 1e-10 over 200 steps: as in LibTorch,
//   and as in Python for what LibTorch lacks (`tools/golden_optim.py`)
#include <cstdint>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/algorithms.h>

namespace torchspan::optim::conformance_test {
namespace {

constexpr int kSteps = 200;
constexpr double kTolerance = 1e-12;

using Random = std::mt19937_64;
double uniform(Random& random, double least, double most) {
  return std::uniform_real_distribution<double>(least, most)(random);
}
bool coin(Random& random) { return random() % 2 == 0; }
double sometimes(Random& random, double most) { return coin(random) ? uniform(random, 0, most) : 0; }

struct SgdCases {
  static constexpr bool kTakesSparse = true;
  static constexpr const char* kRefusal = "weight_decay = 0.1";
  static SGD random_options(Random& random, bool sparse) {
    SGD options{.lr = uniform(random, 1e-3, 0.3), .momentum = sometimes(random, 0.99)};
    if (!sparse) options.weight_decay = sometimes(random, 0.2);
    options.nesterov = options.momentum > 0 && coin(random);
    if (!options.nesterov) options.dampening = sometimes(random, 0.9);
    return options;
  }
  static std::unique_ptr<torch::optim::Optimizer> oracle(const SGD& options,
                                                         std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(options.lr)
                                                                          .momentum(options.momentum)
                                                                          .dampening(options.dampening)
                                                                          .weight_decay(options.weight_decay)
                                                                          .nesterov(options.nesterov));
  }
  static SGD sparse_refusing() { return {.lr = 0.1, .weight_decay = 0.1}; }
};

struct AdagradCases {
  static constexpr bool kTakesSparse = true;
  static constexpr const char* kRefusal = "weight_decay = 0.1";
  static Adagrad random_options(Random& random, bool sparse) {
    return {.lr = uniform(random, 1e-3, 0.3),
            .lr_decay = sometimes(random, 0.1),
            .weight_decay = sparse ? 0 : sometimes(random, 0.2),
            .initial_accumulator_value = sometimes(random, 2),
            .eps = coin(random) ? 1e-10 : 1e-3};
  }
  static std::unique_ptr<torch::optim::Optimizer> oracle(const Adagrad& options,
                                                         std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::Adagrad>(
        std::move(parameters), torch::optim::AdagradOptions(options.lr)
                                   .lr_decay(options.lr_decay)
                                   .weight_decay(options.weight_decay)
                                   .initial_accumulator_value(options.initial_accumulator_value)
                                   .eps(options.eps));
  }
  static Adagrad sparse_refusing() { return {.weight_decay = 0.1}; }
};

/// Adam and AdamW: `Ours` and LibTorch's class and options of the same name.
template <class Ours, class Theirs, class TheirOptions>
struct AdamLikeCases {
  static constexpr bool kTakesSparse = false;
  static constexpr const char* kRefusal = "SparseAdam";
  static Ours random_options(Random& random, bool) {
    return {.lr = uniform(random, 1e-4, 0.1),
            .beta1 = sometimes(random, 0.99),
            .beta2 = uniform(random, 0.5, 0.9999),
            .eps = coin(random) ? 1e-8 : 1e-3,
            .weight_decay = sometimes(random, 0.2),
            .amsgrad = coin(random)};
  }
  static std::unique_ptr<torch::optim::Optimizer> oracle(const Ours& options,
                                                         std::vector<at::Tensor> parameters) {
    return std::make_unique<Theirs>(std::move(parameters), TheirOptions(options.lr)
                                                               .betas({options.beta1, options.beta2})
                                                               .eps(options.eps)
                                                               .weight_decay(options.weight_decay)
                                                               .amsgrad(options.amsgrad));
  }
  static Ours sparse_refusing() { return {}; }
};
using AdamCases = AdamLikeCases<Adam, torch::optim::Adam, torch::optim::AdamOptions>;
using AdamWCases = AdamLikeCases<AdamW, torch::optim::AdamW, torch::optim::AdamWOptions>;

struct RMSpropCases {
  static constexpr bool kTakesSparse = false;
  static constexpr const char* kRefusal = "use SGD";
  static RMSprop random_options(Random& random, bool) {
    return {.lr = uniform(random, 1e-4, 0.1),
            .alpha = uniform(random, 0.5, 0.999),
            .eps = coin(random) ? 1e-8 : 1e-3,
            .weight_decay = sometimes(random, 0.2),
            .momentum = sometimes(random, 0.99),
            .centered = coin(random)};
  }
  static std::unique_ptr<torch::optim::Optimizer> oracle(const RMSprop& options,
                                                         std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::RMSprop>(std::move(parameters),
                                                   torch::optim::RMSpropOptions(options.lr)
                                                       .alpha(options.alpha)
                                                       .eps(options.eps)
                                                       .weight_decay(options.weight_decay)
                                                       .momentum(options.momentum)
                                                       .centered(options.centered));
  }
  static RMSprop sparse_refusing() { return {}; }
};

/// Two equal sets of leaves, for this library and for the oracle, and the random gradients of both.
class Pair {
 public:
  Pair(std::uint64_t seed, std::vector<at::Tensor> values)
      : generator_(at::detail::createCPUGenerator(seed)) {
    for (const at::Tensor& value : values) {
      ours.push_back(value.clone().set_requires_grad(true));
      theirs.push_back(value.clone().set_requires_grad(true));
    }
  }
  at::Tensor dense(std::size_t index) { return normal(ours[index].sizes()); }
  at::Tensor sparse(std::size_t index, std::int64_t entries) {
    const at::Tensor& like = ours[index];
    auto sizes = like.sizes().vec();
    const at::Tensor rows = at::randint(sizes[0], {1, entries}, generator_, torch::kInt64);
    sizes[0] = entries;
    return torch::sparse_coo_tensor(rows, normal(sizes), like.sizes());
  }
  /// The largest difference relative to the size of the values.
  double distance() const {
    double worst = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (ours[i].numel() == 0) continue;
      const at::Tensor scale = theirs[i].detach().abs().clamp_min(1);
      worst = std::max(worst, ((ours[i] - theirs[i]).abs() / scale).max().item<double>());
    }
    return worst;
  }

  std::vector<at::Tensor> ours, theirs;

 private:
  at::Tensor normal(at::IntArrayRef sizes) { return at::randn(sizes, generator_, torch::kFloat64); }
  at::Generator generator_;
};

std::vector<at::Tensor> values_of_many_shapes(std::uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  const auto normal = [&](at::IntArrayRef sizes) { return at::randn(sizes, generator, torch::kFloat64); };
  return {normal({3, 5}), normal({}), normal({0, 4}), normal({4, 6}).t(), normal({2, 3, 2, 2})};
}

template <class Cases>
class OptimizerConformance : public ::testing::Test {};
using AllOptimizers = ::testing::Types<SgdCases, AdagradCases, AdamCases, AdamWCases, RMSpropCases>;
TYPED_TEST_SUITE(OptimizerConformance, AllOptimizers);

template <class Cases>
class SparseConformance : public ::testing::Test {};
using SparseOptimizers = ::testing::Types<SgdCases, AdagradCases>;
TYPED_TEST_SUITE(SparseConformance, SparseOptimizers);

TYPED_TEST(OptimizerConformance, EqualsLibTorchForRandomOptionsGradientsAndGaps) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    Pair pair(seed, values_of_many_shapes(seed));
    const auto options = TypeParam::random_options(random, false);
    const auto ours = options.build(pair.ours);
    const auto theirs = TypeParam::oracle(options, pair.theirs);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<at::Tensor> gradients(pair.ours.size());
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        if (random() % 4 != 0) gradients[i] = pair.dense(i);
        pair.theirs[i].mutable_grad() = gradients[i].defined() ? gradients[i].clone() : at::Tensor();
      }
      ours->step(gradients);
      theirs->step();
    }
    EXPECT_LE(pair.distance(), kTolerance);
  }
}

TYPED_TEST(SparseConformance, EqualsLibTorchForSparseGradientsWithRepeatedEntries) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    Pair pair(seed, {torch::ones({7, 3}, torch::kFloat64), torch::ones({5}, torch::kFloat64)});
    const auto options = TypeParam::random_options(random, true);
    const auto ours = options.build(pair.ours);
    const auto theirs = TypeParam::oracle(options, pair.theirs);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<at::Tensor> gradients(pair.ours.size());
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        gradients[i] = pair.sparse(i, static_cast<std::int64_t>(1 + random() % 6));
        pair.theirs[i].mutable_grad() = gradients[i].clone();
      }
      ours->step(gradients);
      theirs->step();
    }
    EXPECT_LE(pair.distance(), kTolerance);
  }
}

TYPED_TEST(SparseConformance, TakesDenseAndSparseGradientsEvenEmptyOnesInTurns) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    Pair pair(seed, {torch::ones({7, 3}, torch::kFloat64)});
    const auto options = TypeParam::random_options(random, true);
    const auto mixed = options.build(pair.ours);
    const auto dense = options.build(pair.theirs);
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor gradient =
          coin(random) ? pair.dense(0) : pair.sparse(0, static_cast<std::int64_t>(random() % 8));
      mixed->step(std::vector<at::Tensor>{gradient});
      dense->step(std::vector<at::Tensor>{gradient.is_sparse() ? gradient.to_dense() : gradient});
    }
    EXPECT_LE(pair.distance(), kTolerance);
  }
}

// peer: dist_optimizer_test.py dist_optim_none_grads: same, Adagrad too (the peer's updates the wrong
//   parameter)
TYPED_TEST(OptimizerConformance, UpdatesOnlyTheParameterThatHasAGradient) {
  Pair pair(1, {torch::ones({3}, torch::kFloat64), torch::ones({3}, torch::kFloat64)});
  Random random(1);
  const auto options = TypeParam::random_options(random, false);
  options.build(pair.ours)->step(std::vector<at::Tensor>{at::Tensor(), pair.dense(1)});
  EXPECT_TRUE(pair.ours[0].equal(pair.theirs[0]));
  EXPECT_FALSE(pair.ours[1].equal(pair.theirs[1]));
}

// peer: dist_optimizer_test.py dist_optim_none_grads
TYPED_TEST(OptimizerConformance, CountsNoStepAndKeepsNoStateForASkippedParameter) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    Pair pair(seed, {torch::ones({3}, torch::kFloat64)});
    const auto options = TypeParam::random_options(random, false);
    const auto with_gaps = options.build(pair.ours);
    const auto without = options.build(pair.theirs);
    for (int step = 0; step < kSteps; ++step) {
      with_gaps->step(std::vector<at::Tensor>{at::Tensor()});
      const std::vector<at::Tensor> gradient = {pair.dense(0)};
      with_gaps->step(gradient);
      without->step(gradient);
    }
    EXPECT_TRUE(pair.ours[0].equal(pair.theirs[0]));
  }
}

TYPED_TEST(OptimizerConformance, MaximizesByNegatingTheGradient) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    Pair pair(seed, {torch::ones({3, 2}, torch::kFloat64)});
    auto options = TypeParam::random_options(random, true);
    const auto minimize = options.build(pair.theirs);
    options.maximize = true;
    const auto maximize = options.build(pair.ours);
    for (int step = 0; step < kSteps; ++step) {
      const bool sparse = TypeParam::kTakesSparse && coin(random);
      const at::Tensor gradient = sparse ? pair.sparse(0, 2) : pair.dense(0);
      maximize->step(std::vector<at::Tensor>{gradient});
      minimize->step(std::vector<at::Tensor>{-gradient});
    }
    EXPECT_LE(pair.distance(), kTolerance);
  }
}

TYPED_TEST(OptimizerConformance, LeavesTheGradientsAsTheyAre) {
  Random random(3);
  Pair pair(3, {torch::ones({4, 2}, torch::kFloat64), torch::ones({4}, torch::kFloat64)});
  const auto options = TypeParam::random_options(random, true);
  const auto optimizer = options.build(pair.ours);
  const bool sparse = TypeParam::kTakesSparse;
  const std::vector<at::Tensor> gradients = {pair.dense(0), sparse ? pair.sparse(1, 3) : pair.dense(1)};
  const std::vector<at::Tensor> before = {gradients[0].clone(), gradients[1].clone()};
  for (int step = 0; step < 3; ++step) optimizer->step(gradients);
  EXPECT_TRUE(gradients[0].equal(before[0]));
  if (!sparse) {
    EXPECT_TRUE(gradients[1].equal(before[1]));
    return;
  }
  EXPECT_TRUE(gradients[1]._values().equal(before[1]._values()));
  EXPECT_EQ(gradients[1].is_coalesced(), before[1].is_coalesced());
}

TYPED_TEST(OptimizerConformance, RefusesASparseGradientItCannotUseNamingTheParameterAndTheOption) {
  Pair pair(4, {torch::ones({3}, torch::kFloat64), torch::ones({4}, torch::kFloat64)});
  const auto optimizer = TypeParam::sparse_refusing().build(pair.ours);
  try {
    optimizer->step(std::vector<at::Tensor>{pair.dense(0), pair.sparse(1, 2)});
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(error.what(), ::testing::HasSubstr(std::string(optimizer->name()) + ": parameter 1"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr(TypeParam::kRefusal));
  }
  EXPECT_TRUE(pair.ours[0].equal(pair.theirs[0]));
}

TEST(Sgd, FollowsItsClosedFormUnderAConstantGradient) {
  const at::Tensor leaf = torch::zeros({1}, torch::kFloat64).set_requires_grad(true);
  const auto optimizer = SGD{.lr = 0.1, .momentum = 0.5}.build({leaf});
  double expected = 0;
  for (int step = 1; step <= 30; ++step) {
    optimizer->step(std::vector<at::Tensor>{torch::ones({1}, torch::kFloat64)});
    expected -= 0.1 * 2 * (1 - std::pow(0.5, step));  // the buffer is a geometric sum
    EXPECT_NEAR(leaf.item<double>(), expected, kTolerance);
  }
}

TEST(Adagrad, FollowsItsClosedFormUnderAConstantGradient) {
  const at::Tensor leaf = torch::zeros({1}, torch::kFloat64).set_requires_grad(true);
  const auto optimizer = Adagrad{.lr = 0.1, .lr_decay = 0.25, .eps = 0}.build({leaf});
  double expected = 0;
  for (int step = 1; step <= 30; ++step) {
    optimizer->step(std::vector<at::Tensor>{torch::full({1}, 3.0, torch::kFloat64)});
    expected -= 0.1 / (1 + (step - 1) * 0.25) / std::sqrt(step);
    EXPECT_NEAR(leaf.item<double>(), expected, kTolerance);
  }
}

TEST(Adagrad, ChangesOnlyTheRowsThatASparseGradientTouches) {
  const at::Tensor leaf = torch::ones({4, 2}, torch::kFloat64).set_requires_grad(true);
  const at::Tensor gradient =
      torch::sparse_coo_tensor(torch::tensor({{1, 3, 1}}), torch::ones({3, 2}, torch::kFloat64), {4, 2});
  Adagrad{.lr = 0.5, .eps = 0}.build({leaf})->step(std::vector<at::Tensor>{gradient});
  const at::Tensor expected =
      torch::tensor({1.0, 0.5, 1.0, 0.5}, torch::kFloat64).unsqueeze(1).expand({4, 2});
  EXPECT_TRUE(leaf.equal(expected));
}

}  // namespace
}  // namespace torchspan::optim::conformance_test
