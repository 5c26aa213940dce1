// Compares the one-pass kernels bit for bit with the optimizers' formulas, written here with one rounding per
// operation, and up to rounding with the operation-by-operation rules.
#include <cmath>
#include <cstdint>
#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/optim/algorithms.h>

namespace torchspan::optim::fused_step_test {
namespace {

using Random = std::mt19937_64;
double uniform(Random& random, double least, double most) {
  return std::uniform_real_distribution<double>(least, most)(random);
}
bool coin(Random& random) { return random() % 2 == 0; }
double sometimes(Random& random, double most) { return coin(random) ? uniform(random, 0, most) : 0; }

/// A formula's parameter and state.
struct Values {
  at::Tensor p, a, b, c;
};

template <class Options>
at::Tensor descent(const Options& options, const Values& at, const at::Tensor& gradient) {
  const at::Tensor signed_gradient = options.maximize ? -gradient : gradient;
  return options.weight_decay == 0 ? signed_gradient : signed_gradient + at.p * options.weight_decay;
}

template <class T>
at::Tensor root_as(const at::Tensor& squares) {
  at::Tensor roots = squares.clone();
  T* const values = roots.data_ptr<T>();
  for (std::int64_t i = 0; i < roots.numel(); ++i) values[i] = std::sqrt(values[i]);
  return roots;
}
/// The root as IEEE 754 rounds it: at::sqrt differs in LibTorch builds with MKL.
at::Tensor root_of(const at::Tensor& squares) {
  return squares.scalar_type() == at::kFloat ? root_as<float>(squares) : root_as<double>(squares);
}

struct SgdCase {
  static SGD random_options(Random& random) {
    SGD options{.lr = uniform(random, 1e-3, 0.3), .momentum = sometimes(random, 0.99)};
    options.weight_decay = sometimes(random, 0.2);
    options.nesterov = options.momentum > 0 && coin(random);
    if (!options.nesterov) options.dampening = sometimes(random, 0.9);
    options.maximize = coin(random);
    return options;
  }
  static void formula(const SGD& options, Values& at, const at::Tensor& gradient, int step) {
    at::Tensor g = descent(options, at, gradient);
    if (options.momentum != 0) {
      at.a = step == 1 ? g : at.a * options.momentum + g * (1 - options.dampening);
      g = options.nesterov ? g + at.a * options.momentum : at.a;
    }
    at.p = at.p + g * -options.lr;
  }
};

template <class Options>
Options random_adam(Random& random) {
  return {.lr = uniform(random, 1e-4, 0.1),
          .beta1 = sometimes(random, 0.99),
          .beta2 = uniform(random, 0.5, 0.9999),
          .eps = coin(random) ? 1e-8 : 1e-3,
          .weight_decay = sometimes(random, 0.2),
          .amsgrad = coin(random),
          .maximize = coin(random)};
}

template <class Options>
void adam_formula(const Options& options, Values& at, const at::Tensor& g, int step) {
  at.a = at.a * options.beta1 + g * (1 - options.beta1);
  at.b = at.b * options.beta2 + g * (1 - options.beta2) * g;
  at.c = at::maximum(at.c, at.b);
  const at::Tensor root = root_of(options.amsgrad ? at.c : at.b);
  const at::Tensor scale = root / std::sqrt(1 - std::pow(options.beta2, step)) + options.eps;
  at.p = at.p + at.a * -(options.lr / (1 - std::pow(options.beta1, step))) / scale;
}

struct AdamCase {
  static Adam random_options(Random& random) { return random_adam<Adam>(random); }
  static void formula(const Adam& options, Values& at, const at::Tensor& gradient, int step) {
    adam_formula(options, at, descent(options, at, gradient), step);
  }
};

struct AdamWCase {
  static AdamW random_options(Random& random) { return random_adam<AdamW>(random); }
  static void formula(const AdamW& options, Values& at, const at::Tensor& gradient, int step) {
    at.p = at.p * (1 - options.lr * options.weight_decay);
    adam_formula(options, at, options.maximize ? -gradient : gradient, step);
  }
};

struct AdagradCase {
  static Adagrad random_options(Random& random) {
    return {.lr = uniform(random, 1e-3, 0.3),
            .lr_decay = sometimes(random, 0.1),
            .weight_decay = sometimes(random, 0.2),
            .eps = coin(random) ? 1e-10 : 1e-3,
            .maximize = coin(random)};
  }
  static void formula(const Adagrad& options, Values& at, const at::Tensor& gradient, int step) {
    const at::Tensor g = descent(options, at, gradient);
    at.a = at.a + g * g;
    at.p = at.p + g * -(options.lr / (1 + (step - 1) * options.lr_decay)) / (root_of(at.a) + options.eps);
  }
};

struct RmspropCase {
  static RMSprop random_options(Random& random) {
    return {.lr = uniform(random, 1e-4, 0.1),
            .alpha = uniform(random, 0.5, 0.999),
            .eps = coin(random) ? 1e-3 : 1e-2,
            .weight_decay = sometimes(random, 0.2),
            .momentum = sometimes(random, 0.99),
            .centered = coin(random),
            .maximize = coin(random)};
  }
  static void formula(const RMSprop& options, Values& at, const at::Tensor& gradient, int) {
    const at::Tensor g = descent(options, at, gradient);
    at.a = at.a * options.alpha + g * (1 - options.alpha) * g;
    at.b = at.b * options.alpha + g * (1 - options.alpha);
    const at::Tensor scale = root_of(options.centered ? at.a - at.b * at.b : at.a) + options.eps;
    if (options.momentum == 0) {
      at.p = at.p + g * -options.lr / scale;
    } else {
      at.c = at.c * options.momentum + g / scale;
      at.p = at.p + at.c * -options.lr;
    }
  }
};

template <class Case>
class FusedStep : public ::testing::Test {};
using Cases = ::testing::Types<SgdCase, AdamCase, AdamWCase, AdagradCase, RmspropCase>;
TYPED_TEST_SUITE(FusedStep, Cases);

constexpr int kSteps = 4;
constexpr int kSeeds = 24;
constexpr std::int64_t kOfSeveralThreads = 100'003;

at::Tensor leaf_of(const at::Tensor& value) { return value.detach().set_requires_grad(true); }

/// A centered RMSprop may take the root of a variance that rounding made negative.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.nan_to_num(1e30), b.nan_to_num(1e30));
}

/// Steps `parameter` with random gradients that depend on the seed only; `format` may change their layout.
template <class Options, class Format>
void train(const Options& options, const at::Tensor& parameter, std::uint64_t seed, Format&& format) {
  const auto optimizer = options.build({parameter});
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (int step = 1; step <= kSteps; ++step) {
    const at::Tensor gradient = at::randn(parameter.sizes(), generator, parameter.options());
    optimizer->step(std::vector<at::Tensor>{format(gradient)});
  }
}

at::Tensor unchanged(const at::Tensor& gradient) { return gradient; }

TYPED_TEST(FusedStep, EqualsItsFormulaBitForBitForAllSizesAndOffsets) {
  constexpr std::int64_t kSizes[] = {0, 1, 2, 3, 5, 7, 8, 9, 15, 17, 31, 33, 64, 1001, kOfSeveralThreads};
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Random random(seed);
    const auto options = TypeParam::random_options(random);
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      const std::int64_t size = kSizes[random() % std::size(kSizes)];
      const auto offset = static_cast<std::int64_t>(random() % 9);
      SCOPED_TRACE(::testing::Message()
                   << "seed " << seed << ", " << dtype << ", " << size << " at " << offset);
      at::Generator generator = at::detail::createCPUGenerator(seed);
      const at::Tensor around = at::randn({size + 16}, generator, dtype), before = around.clone();
      const at::Tensor parameter = leaf_of(around.narrow(0, offset, size));
      const at::Tensor zeros = at::zeros({size}, dtype);
      Values expected{parameter.detach().clone(), zeros, zeros, zeros};
      const auto optimizer = options.build({parameter});
      for (int step = 1; step <= kSteps; ++step) {
        const at::Tensor gradient = at::randn({size + 16}, generator, dtype).narrow(0, 8 - offset, size);
        optimizer->step(std::vector<at::Tensor>{gradient});
        TypeParam::formula(options, expected, gradient, step);
      }
      EXPECT_TRUE(same_bits(parameter.detach(), expected.p));
      EXPECT_TRUE(around.narrow(0, 0, offset).equal(before.narrow(0, 0, offset)));
      const std::int64_t end = offset + size;
      EXPECT_TRUE(around.narrow(0, end, size + 16 - end).equal(before.narrow(0, end, size + 16 - end)));
    }
  }
}

TYPED_TEST(FusedStep, HasTheSameBitsWithAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  Random random(1);
  const auto options = TypeParam::random_options(random);
  const at::Tensor value = at::randn({kOfSeveralThreads});
  std::vector<at::Tensor> results;
  for (const int count : {1, 2, 3, 4}) {
    at::set_num_threads(count);
    results.push_back(leaf_of(value.clone()));
    train(options, results.back(), 1, unchanged);
  }
  at::set_num_threads(threads);
  for (const at::Tensor& result : results) EXPECT_TRUE(result.equal(results.front()));
}

TYPED_TEST(FusedStep, AgreesWithTheRuleThatUpdatesStridedParameters) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const auto options = TypeParam::random_options(random);
    const at::Tensor value = at::randn({33, 5}, at::detail::createCPUGenerator(seed), torch::kDouble);
    const at::Tensor dense = leaf_of(value.clone());
    const at::Tensor strided = leaf_of(at::empty({33, 5, 2}, torch::kDouble).select(2, 1).copy_(value));
    ASSERT_FALSE(strided.is_contiguous());
    train(options, dense, seed, unchanged);
    train(options, strided, seed, unchanged);
    EXPECT_TRUE(at::allclose(dense, strided, /*rtol=*/1e-12, /*atol=*/1e-12));
  }
}

TYPED_TEST(FusedStep, TakesParametersAndGradientsOfAnyMemoryFormat) {
  Random random(2);
  const auto options = TypeParam::random_options(random);
  const at::Tensor value = at::randn({2, 3, 4, 5}, torch::kDouble);
  const at::Tensor expected = leaf_of(value.clone());
  train(options, expected, 7, unchanged);
  const at::Tensor transposed = leaf_of(value.clone()), negated = leaf_of(value.clone()),
                   last = leaf_of(value.contiguous(at::MemoryFormat::ChannelsLast)),
                   mixed = leaf_of(value.contiguous(at::MemoryFormat::ChannelsLast));
  train(options, transposed, 7,
        [](const at::Tensor& g) { return g.transpose(1, 3).contiguous().transpose(1, 3); });
  train(options, negated, 7, [](const at::Tensor& g) { return at::_neg_view(-g); });
  train(options, last, 7, [](const at::Tensor& g) { return g.contiguous(at::MemoryFormat::ChannelsLast); });
  train(options, mixed, 7, [](const at::Tensor& g) { return g.contiguous(); });
  for (const at::Tensor& result : {transposed, negated, last, mixed}) EXPECT_TRUE(result.equal(expected));

  const at::Tensor full = leaf_of(value.clone()), expanded = leaf_of(value.clone());
  train(options, full, 7, [](const at::Tensor& g) { return g.select(0, 0).expand_as(g).contiguous(); });
  train(options, expanded, 7, [](const at::Tensor& g) { return g.select(0, 0).expand_as(g); });
  EXPECT_TRUE(expanded.equal(full));
}

TYPED_TEST(FusedStep, ReadsAGradientThatSharesMemoryWithTheParameterBeforeItChanges) {
  Random random(3);
  const auto options = TypeParam::random_options(random);
  for (const std::int64_t shift : {0, 1, 5}) {
    const at::Tensor values = at::randn({100}, torch::kDouble), copies = values.clone();
    const at::Tensor shared = leaf_of(values.narrow(0, 0, 90)), apart = leaf_of(copies.narrow(0, 0, 90));
    options.build({shared})->step(std::vector<at::Tensor>{values.narrow(0, shift, 90)});
    options.build({apart})->step(std::vector<at::Tensor>{copies.narrow(0, shift, 90).clone()});
    EXPECT_TRUE(shared.equal(apart)) << "shift " << shift;
  }
}

TYPED_TEST(FusedStep, StepsParametersThatAreViewsOfOneBufferOneByOne) {
  Random random(4);
  const auto options = TypeParam::random_options(random);
  const at::Tensor flat = at::randn({30}), copies = flat.clone();
  const std::vector<at::Tensor> views = {leaf_of(flat.narrow(0, 0, 11)), leaf_of(flat.narrow(0, 11, 19))};
  const std::vector<at::Tensor> apart = {leaf_of(copies.narrow(0, 0, 11).clone()),
                                         leaf_of(copies.narrow(0, 11, 19).clone())};
  const auto of_views = options.build(views), of_copies = options.build(apart);
  for (int step = 1; step <= kSteps; ++step) {
    const std::vector<at::Tensor> gradients = {at::randn({11}), at::randn({19})};
    of_views->step(gradients);
    of_copies->step(gradients);
  }
  for (std::size_t i = 0; i < views.size(); ++i) EXPECT_TRUE(views[i].equal(apart[i]));
}

TYPED_TEST(FusedStep, ContinuesFromAStateOfAnotherMemoryFormat) {
  Random random(5);
  const auto options = TypeParam::random_options(random);
  const at::Tensor value = at::randn({6, 5}, torch::kDouble), gradient = at::randn({6, 5}, torch::kDouble);
  const at::Tensor one = leaf_of(value.clone()), other = leaf_of(value.clone());
  const auto first = options.build({one}), second = options.build({other});
  first->step(std::vector<at::Tensor>{gradient});
  second->step(std::vector<at::Tensor>{gradient});
  ParameterState state = first->state(0);
  for (auto& [name, tensor] : state) {
    if (name != "step") tensor = tensor.t().contiguous().t();
  }
  second->load_state(0, state);
  first->step(std::vector<at::Tensor>{gradient});
  second->step(std::vector<at::Tensor>{gradient});
  EXPECT_TRUE(at::allclose(one, other, /*rtol=*/1e-12, /*atol=*/1e-12));
}

TYPED_TEST(FusedStep, KeepsNaNsInTheElementsOfTheirGradients) {
  Random random(6);
  const auto options = TypeParam::random_options(random);
  const at::Tensor parameter = leaf_of(at::ones({20}));
  at::Tensor gradient = at::ones({20});
  gradient[3] = NAN;
  gradient[17] = NAN;
  const auto optimizer = options.build({parameter});
  for (int step = 1; step <= 2; ++step) optimizer->step(std::vector<at::Tensor>{gradient});
  at::Tensor expected = at::zeros({20}, torch::kBool);
  expected[3] = true;
  expected[17] = true;
  EXPECT_TRUE(at::isnan(parameter).equal(expected));
}

}  // namespace
}  // namespace torchspan::optim::fused_step_test
