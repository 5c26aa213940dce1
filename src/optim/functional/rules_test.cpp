// Common behavior of all rules: precision, version counters, several parameters at once, state.
#include <cstdint>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/distributed_optimizer.h>

#include "tests/support/errors.h"

namespace torchspan::optim::rules_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torchspan::testing::error_of;

/// The options of every dense kind that use all of its state, with `foreach` and `float32_state`.
std::vector<OptimizerSpec> dense_specs(std::optional<bool> foreach, bool float32_state = false) {
  const auto f = foreach;
  const bool s = float32_state;
  return {
      SGD{.lr = 0.1, .foreach = f, .float32_state = s},
      SGD{.lr = 0.1,
          .momentum = 0.9,
          .weight_decay = 0.1,
          .nesterov = true,
          .foreach = f,
          .float32_state = s},
      SGD{.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .maximize = true, .foreach = f, .float32_state = s},
      Adagrad{.lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.1, .foreach = f, .float32_state = s},
      Adam{.lr = 0.1, .weight_decay = 0.1, .amsgrad = true, .foreach = f, .float32_state = s},
      AdamW{.lr = 0.1, .amsgrad = true, .maximize = true, .foreach = f, .float32_state = s},
      Adadelta{.eps = 1e-3, .weight_decay = 0.1, .foreach = f, .float32_state = s},
      RMSprop{.weight_decay = 0.1, .momentum = 0.9, .centered = true, .foreach = f, .float32_state = s},
      RMSprop{.lr = 0.1, .maximize = true, .foreach = f, .float32_state = s},
      Rprop{.lr = 0.1, .foreach = f, .float32_state = s},
      Adamax{.lr = 0.1, .weight_decay = 0.1, .foreach = f, .float32_state = s}};
}

at::Tensor leaf_of(const at::Tensor& value) { return value.detach().clone().set_requires_grad(true); }

// peer: dist_optimizer_test.py multi-tensor optimizers equal single-tensor ones: same bits
TEST(Rules, StepManyParametersAtOnceWithTheSameBitsAsOneByOne) {
  const auto simple = dense_specs(false), many = dense_specs(true);
  for (std::size_t k = 0; k < simple.size(); ++k) {
    SCOPED_TRACE(simple[k].kind);
    at::Generator generator = at::detail::createCPUGenerator(k + 1);
    std::vector<at::Tensor> ours, theirs;
    for (const auto dtype :
         {torch::kDouble, torch::kFloat, torch::kDouble, torch::kFloat, torch::kComplexDouble}) {
      const at::Tensor value = at::randn({3, 2}, generator, dtype);
      ours.push_back(leaf_of(value));
      theirs.push_back(leaf_of(value));
    }
    const auto one_by_one = simple[k].build(ours), at_once = many[k].build(theirs);
    for (std::size_t step = 0; step < 30; ++step) {
      std::vector<at::Tensor> gradients(ours.size());
      for (std::size_t i = 0; i < ours.size(); ++i) {
        if ((step + i) % 5 != 0) gradients[i] = at::randn({3, 2}, generator, ours[i].scalar_type());
      }
      one_by_one->step(gradients);
      at_once->step(gradients);
    }
    for (std::size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(ours[i].equal(theirs[i])) << "parameter " << i;
  }
}

TEST(Rules, TreatAComplexParameterAsPairsOfReals) {
  for (const OptimizerSpec& spec : dense_specs(false)) {
    SCOPED_TRACE(spec.kind);
    at::Generator generator = at::detail::createCPUGenerator(5);
    const at::Tensor complex = at::randn({3, 2}, generator, torch::kComplexDouble).set_requires_grad(true);
    const at::Tensor real = leaf_of(at::view_as_real(complex.detach()));
    const auto of_complex = spec.build({complex}), of_real = spec.build({real});
    for (int step = 0; step < 20; ++step) {
      const at::Tensor gradient = at::randn({3, 2}, generator, torch::kComplexDouble).conj();
      of_complex->step(std::vector<at::Tensor>{gradient});
      of_real->step(std::vector<at::Tensor>{at::view_as_real(gradient.resolve_conj())});
    }
    EXPECT_TRUE(at::view_as_real(complex.detach()).equal(real));
    EXPECT_TRUE(torch::isfinite(real).all().item<bool>());
  }
}

TEST(Rules, KeepTheStateOfHalfParametersInFloat32AndRoundOnceAStep) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const auto halves = dense_specs(false, true), at_once = dense_specs(true, true),
               floats = dense_specs(false);
    for (std::size_t k = 0; k < halves.size(); ++k) {
      SCOPED_TRACE(halves[k].kind);
      at::Generator generator = at::detail::createCPUGenerator(k + 1);
      const at::Tensor value = at::randn({50}, generator, torch::kFloat).to(dtype);
      const at::Tensor half = leaf_of(value), many = leaf_of(value), full = leaf_of(value.to(torch::kFloat));
      const auto ours = halves[k].build({half}), ours_many = at_once[k].build({many}),
                 oracle = floats[k].build({full});
      for (int step = 0; step < 10; ++step) {
        const at::Tensor gradient = at::randn({50}, generator, torch::kFloat).to(dtype);
        ours->step(std::vector<at::Tensor>{gradient});
        ours_many->step(std::vector<at::Tensor>{gradient});
        oracle->step(std::vector<at::Tensor>{gradient.to(torch::kFloat)});
        at::NoGradGuard no_grad;
        full.copy_(full.to(dtype));  // the oracle: float32 all the way, rounded after each step
      }
      EXPECT_TRUE(half.equal(full.to(dtype)));
      EXPECT_TRUE(many.equal(half));
      for (const auto& [name, tensor] : ours->state(0)) {
        if (name == "step") continue;
        EXPECT_EQ(tensor.scalar_type(), torch::kFloat) << name;
      }
    }
  }
}

TEST(Rules, AdvanceAVersionByOneAStepSoThatNoGraphMissesIt) {
  std::vector<OptimizerSpec> all = dense_specs(false);
  for (const OptimizerSpec& spec : dense_specs(true)) all.push_back(spec);
  all.push_back(SparseAdam{});
  for (const OptimizerSpec& spec : all) {
    SCOPED_TRACE(spec.kind);
    const at::Tensor leaf = leaf_of(torch::ones({3, 2}, torch::kDouble)), skipped = leaf_of(leaf);
    const auto optimizer = spec.build({leaf, skipped});
    at::Tensor gradient = torch::ones({3, 2}, torch::kDouble);
    if (spec.kind == "SparseAdam") gradient = gradient.to_sparse(1);
    const at::Tensor loss = (leaf * leaf).sum();
    const void* data = leaf.data_ptr();
    for (std::uint32_t step = 1; step <= 3; ++step) {
      optimizer->step(std::vector<at::Tensor>{gradient, at::Tensor()});
      EXPECT_EQ(leaf._version(), step);
    }
    EXPECT_EQ(skipped._version(), 0U);
    EXPECT_EQ(leaf.data_ptr(), data);
    EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad());
    EXPECT_THROW(loss.backward(), c10::Error);
  }
}

TEST(Rules, RefuseGradientsOfTheWrongLayoutNamingOptimizerAndParameter) {
  const at::Tensor sparse = torch::ones({3, 2}, torch::kDouble).to_sparse(1);
  for (const OptimizerSpec& spec : dense_specs(std::nullopt)) {
    if (spec.kind == "SGD" || spec.kind == "Adagrad") continue;
    const at::Tensor leaf = leaf_of(torch::ones({3, 2}, torch::kDouble));
    const auto optimizer = spec.build({leaf});
    optimizer->set_parameter_names({"table"});
    const Error error = error_of([&] { optimizer->step(std::vector<at::Tensor>{sparse}); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(error.what(),
                HasSubstr(spec.kind + ": parameter 0 'table' (shape [3, 2], Double) got a sparse"));
    EXPECT_TRUE(optimizer->state(0).empty());
  }
  const auto optimizer = OptimizerSpec(SparseAdam{}).build({leaf_of(sparse.to_dense())});
  const Error error = error_of([&] { optimizer->step(std::vector<at::Tensor>{sparse.to_dense()}); });
  EXPECT_THAT(error.what(), AllOf(HasSubstr("SparseAdam: parameter 0"), HasSubstr("dense gradient")));
}

TEST(Rules, MakeStateWithTheFirstGradientAndNotBefore) {
  for (const OptimizerSpec& spec : dense_specs(false)) {
    const at::Tensor first = leaf_of(torch::ones({2}, torch::kDouble)), second = leaf_of(first);
    const auto optimizer = spec.build({first, second});
    EXPECT_TRUE(optimizer->state(0).empty());
    optimizer->step(std::vector<at::Tensor>{torch::ones({2}, torch::kDouble), at::Tensor()});
    EXPECT_EQ(optimizer->state(0).at("step").item<std::int64_t>(), 1);
    EXPECT_TRUE(optimizer->state(1).empty()) << spec.kind;
  }
}

template <class O>
void expect_refused(const O& options, const std::string& text) {
  const Error error = error_of([&] { OptimizerSpec spec(options); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.what(), AllOf(HasSubstr(std::string(O::kName) + ": " + text), HasSubstr("must be")));
}

TEST(Rules, NameTheWrongOptionItsValueAndItsRange) {
  expect_refused(Adam{.lr = -1}, "lr = -1");
  expect_refused(Adam{.beta1 = 1}, "beta1 = 1");
  expect_refused(Adam{.beta2 = -0.5}, "beta2 = -0.5");
  expect_refused(Adam{.eps = -1}, "eps = -1");
  expect_refused(Adam{.weight_decay = INFINITY}, "weight_decay = inf");
  expect_refused(AdamW{.lr = NAN}, "lr = nan");
  expect_refused(AdamW{.beta1 = 1.5}, "beta1 = 1.5");
  expect_refused(AdamW{.weight_decay = -1}, "weight_decay = -1");
  expect_refused(Adamax{.beta2 = 1}, "beta2 = 1");
  expect_refused(Adamax{.weight_decay = -1}, "weight_decay = -1");
  expect_refused(Adadelta{.lr = -1}, "lr = -1");
  expect_refused(Adadelta{.rho = 1.1}, "rho = 1.1");
  expect_refused(Adadelta{.eps = -1}, "eps = -1");
  expect_refused(Adadelta{.weight_decay = -1}, "weight_decay = -1");
  expect_refused(RMSprop{.lr = -1}, "lr = -1");
  expect_refused(RMSprop{.alpha = -1}, "alpha = -1");
  expect_refused(RMSprop{.eps = -1}, "eps = -1");
  expect_refused(RMSprop{.weight_decay = -1}, "weight_decay = -1");
  expect_refused(RMSprop{.momentum = -1}, "momentum = -1");
  expect_refused(Rprop{.lr = -1}, "lr = -1");
  expect_refused(Rprop{.eta_minus = 1}, "eta_minus = 1");
  expect_refused(Rprop{.eta_plus = 1}, "eta_plus = 1");
  expect_refused(Rprop{.step_min = -1}, "step_min = -1");
  expect_refused(Rprop{.step_min = 2, .step_max = 1}, "step_max = 1");
  expect_refused(SparseAdam{.lr = 0}, "lr = 0");
  expect_refused(SparseAdam{.beta1 = 1}, "beta1 = 1");
  expect_refused(SparseAdam{.beta2 = 1}, "beta2 = 1");
  expect_refused(SparseAdam{.eps = 0}, "eps = 0");
}

}  // namespace
}  // namespace torchspan::optim::rules_test
