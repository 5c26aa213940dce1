// LibTorch's fused operators over the stand-in devices, against the same optimizer on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/functional.h>

#include "device/api/torch_version.h"
#include "optim/functional/fused_steps.h"
#include "optim/operators.h"
#include "tests/support/errors.h"
#include "tests/support/stand_in_operators.h"

namespace torchspan::optim::fused_operators_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torchspan::testing::invalid_text;
using torchspan::testing::stand_in;
using torchspan::testing::StandInOperator;
using torchspan::testing::StandInStreams;

at::Tensor leaf_of(const at::Tensor& value) { return value.detach().clone().set_requires_grad(true); }

bool agree(const at::Tensor& there, const at::Tensor& here, double tolerance = 1e-6) {
  return at::allclose(there.cpu().to(at::kDouble), here.to(at::kDouble), tolerance, tolerance);
}

/// Every kind with an operator, with the options that change its formula.
std::vector<OptimizerSpec> all_specs(std::optional<bool> foreach = std::nullopt,
                                     bool master_weights = false) {
  const auto f = foreach;
  const bool m = master_weights;
  return {Adam{.lr = 0.01, .foreach = f, .master_weights = m},
          Adam{.lr = 0.01, .weight_decay = 0.1, .amsgrad = true, .foreach = f, .master_weights = m},
          Adam{.lr = 0.01, .weight_decay = 0.1, .maximize = true, .foreach = f, .master_weights = m},
          AdamW{.lr = 0.01, .weight_decay = 0.1, .amsgrad = true, .foreach = f, .master_weights = m},
          AdamW{.lr = 0.01, .maximize = true, .foreach = f, .master_weights = m},
          SGD{.lr = 0.01, .foreach = f, .master_weights = m},
          SGD{.lr = 0.01, .weight_decay = 0.1, .maximize = true, .foreach = f, .master_weights = m},
          SGD{.lr = 0.01, .momentum = 0.9, .dampening = 0.3, .foreach = f, .master_weights = m},
          SGD{.lr = 0.01,
              .momentum = 0.9,
              .weight_decay = 0.1,
              .nesterov = true,
              .foreach = f,
              .master_weights = m}};
}

/// The same parameters on the stand-in devices and on the CPU, an optimizer for each.
class Twins {
 public:
  Twins(const OptimizerSpec& spec, const std::vector<at::Tensor>& values, bool one_device = false) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const int index = !one_device && i + 1 == values.size() ? 1 : 0;
      there.push_back(values[i].to(stand_in(index)).detach().set_requires_grad(true));
      here.push_back(leaf_of(values[i]));
    }
    on_device = spec.build(there);
    on_cpu = spec.build(here);
  }
  void step(const std::vector<at::Tensor>& gradients) const {
    std::vector<at::Tensor> moved(gradients.size());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) moved[i] = gradients[i].to(there[i].device());
    }
    on_device->step(moved);
    on_cpu->step(gradients);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_TRUE(!moved[i].defined() || moved[i].cpu().equal(gradients[i])) << "only read";
    }
  }
  void expect_equal(double tolerance = 1e-6) const {
    for (std::size_t i = 0; i < here.size(); ++i) {
      EXPECT_TRUE(agree(there[i], here[i], tolerance)) << "parameter " << i << there[i].cpu() << here[i];
      const ParameterState ours = on_device->state(i), theirs = on_cpu->state(i);
      ASSERT_EQ(ours.size(), theirs.size());
      for (const auto& [name, value] : theirs)
        EXPECT_TRUE(agree(ours.at(name), value, tolerance)) << name << " of " << i;
    }
  }
  std::vector<at::Tensor> there, here;
  std::unique_ptr<FunctionalOptimizer> on_device, on_cpu;
};

class FusedOperators : public ::testing::Test {
 protected:
  void SetUp() override { StandInStreams::get().reset(); }
  void TearDown() override { EXPECT_THAT(StandInStreams::get().take_races(), IsEmpty()); }

  /// Steps parameters of `dtype` six times, all of a device in one call.
  void expect_fused_steps(const OptimizerSpec& spec, at::ScalarType dtype, double tolerance) {
    SCOPED_TRACE(spec.kind + " over " + c10::toString(dtype));
    const std::vector<std::vector<std::int64_t>> shapes = {{3, 4}, {7}, {}, {0, 2}, {2, 3, 4}};
    const Twins twins(spec, randn(shapes, dtype));
    const int before = of(spec).calls();
    for (std::uint32_t step = 1; step <= 6; ++step) {
      const std::size_t waits = StandInStreams::get().host_waits();
      std::vector<at::Tensor> gradients = randn(shapes), moved;
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        if (dtype == at::kHalf) gradients[i] = gradients[i] + gradients[i].sign();  // no square underflows
        gradients[i] = gradients[i].to(dtype);
        moved.push_back(gradients[i].to(twins.there[i].device()));
      }
      const std::size_t moves = StandInStreams::get().host_waits() - waits;
      twins.on_device->step(moved);
      EXPECT_EQ(StandInStreams::get().host_waits(), waits + moves) << "the host does not wait";
      twins.on_cpu->step(gradients);
      for (const at::Tensor& parameter : twins.there) EXPECT_EQ(parameter._version(), step);
    }
    twins.expect_equal(tolerance);
    EXPECT_EQ(of(spec).calls() - before, of(spec).exists() ? 6 * 2 : 0) << "one for each device";
  }

  const StandInOperator& of(const OptimizerSpec& spec) const {
    return spec.kind == "Adam" ? adam_ : spec.kind == "AdamW" ? adamw_ : sgd_;
  }
  std::vector<at::Tensor> randn(const std::vector<std::vector<std::int64_t>>& shapes,
                                at::ScalarType dtype = at::kFloat) {
    std::vector<at::Tensor> values;
    for (const auto& shape : shapes) values.push_back(at::randn(shape, generator_).to(dtype));
    return values;
  }

  at::Generator generator_ = at::detail::createCPUGenerator(3);
  const StandInOperator adam_ = torchspan::testing::stand_in_fused_adam(),
                        adamw_ = torchspan::testing::stand_in_fused_adamw(),
                        sgd_ = torchspan::testing::stand_in_fused_sgd();
};

TEST_F(FusedOperators, StepAllParametersOfADeviceInOneCallAsTheCpuDoes) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const OptimizerSpec& spec : all_specs()) expect_fused_steps(spec, dtype, 1e-6);
  }
  EXPECT_TRUE(adam_.exists());
}

#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 4)
/// Whether LibTorch's kernel for the CPU, which the stand-in devices use, subtracts a gradient of half from a parameter.
/// That of 2.6 gives wrong values to parameters of 16 elements and more; GPUs have another one.
bool steps_half_by_sgd() {
  const at::Tensor parameter = at::full({16}, 3, at::kHalf), gradient = at::full({16}, 2, at::kHalf);
  at::_fused_sgd_({parameter}, {gradient}, {}, 0, 0, 1, 0, false, false, true);
  return parameter.eq(1).all().item<bool>();
}
#else
bool steps_half_by_sgd() { return true; }
#endif

TEST_F(FusedOperators, StepHalfParameters) {
  for (const OptimizerSpec& spec : all_specs()) {
    if (spec.kind == "SGD" && !steps_half_by_sgd()) continue;
    // Releases without the operator of SGD lack operations of the CPU that Adam needs for half.
    if (sgd_.exists() || spec.kind == "SGD") expect_fused_steps(spec, at::kHalf, 1e-2);
  }
}

TEST_F(FusedOperators, CountTheStepsOfEveryParameter) {
  const std::vector<std::vector<std::int64_t>> shapes = {{5}, {2, 2}, {3}, {4}};
  for (const OptimizerSpec& spec : all_specs()) {
    SCOPED_TRACE(spec.kind);
    const Twins twins(spec, randn(shapes));
    for (std::size_t step = 0; step < 10; ++step) {
      std::vector<at::Tensor> gradients = randn(shapes);
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        if ((step + i) % 3 == 0) gradients[i] = at::Tensor();
      }
      twins.step(gradients);
    }
    twins.expect_equal();
    const std::vector<at::Tensor> none(shapes.size());
    const int before = of(spec).calls();
    twins.on_device->step(none);
    EXPECT_EQ(of(spec).calls(), before);
  }
}

TEST_F(FusedOperators, KeepMasterWeightsOfHalfParameters) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    for (const OptimizerSpec& spec : all_specs(std::nullopt, /*master_weights=*/true)) {
      SCOPED_TRACE(spec.kind);
      const Twins twins(spec, randn({{20}, {3, 3}}, dtype));
      const int before = of(spec).calls();
      for (int step = 0; step < 5; ++step) twins.step(randn({{20}, {3, 3}}, dtype));
      for (std::size_t i = 0; i < 2; ++i) {
        const at::Tensor master = twins.on_device->state(i).at("master_weight").cpu();
        EXPECT_TRUE(agree(master, twins.on_cpu->state(i).at("master_weight")));
        EXPECT_TRUE(twins.there[i].cpu().equal(master.to(dtype)));
      }
      EXPECT_EQ(of(spec).calls() > before, of(spec).exists());
    }
  }
}

TEST_F(FusedOperators, HaveTheStateOfOtherSteps) {
  const std::vector<std::vector<std::int64_t>> shapes = {{4, 5}, {6}};
  for (const OptimizerSpec& spec : all_specs()) {
    SCOPED_TRACE(spec.kind);
    Twins twins(spec, randn(shapes));
    for (int step = 0; step < 3; ++step) twins.step(randn(shapes));
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      ParameterState ours = twins.on_device->state(i), theirs = twins.on_cpu->state(i);
      for (auto& [name, value] : ours) value = value.clone();
      if (i == 0) {  // of another memory format
        for (auto& [name, value] : theirs) value = value.dim() == 2 ? value.t().contiguous().t() : value;
      }
      twins.on_device->load_state(i, theirs);
      twins.on_cpu->load_state(i, ours);
    }
    const int before = of(spec).calls();
    for (int step = 0; step < 3; ++step) twins.step(randn(shapes));
    twins.expect_equal();
    EXPECT_EQ(of(spec).calls() - before, of(spec).exists() ? 3 * 2 : 0);
  }
}

TEST_F(FusedOperators, AreNotCalledWhereForeachIsSet) {
  for (const bool foreach : {false, true}) {
    for (const OptimizerSpec& spec : all_specs(foreach)) {
      SCOPED_TRACE(spec.kind);
      const Twins twins(spec, randn({{3}, {4}}));
      for (int step = 0; step < 3; ++step) twins.step(randn({{3}, {4}}));
      twins.expect_equal();
      EXPECT_EQ(of(spec).calls(), 0);
    }
  }
}

/// The kernels assume that gradients and slots have the strides of the parameter, and do not share its memory.
TEST_F(FusedOperators, GetGradientsInTheMemoryFormatOfTheParameter) {
  for (const OptimizerSpec& spec : all_specs()) {
    SCOPED_TRACE(spec.kind);
    const Twins twins(spec, randn({{4, 5}, {4, 5}, {4}}), /*one_device=*/true);
    const int before = of(spec).calls();
    for (int step = 0; step < 3; ++step) {
      const std::vector<at::Tensor> gradients = randn({{4, 5}, {4, 1}, {4}});
      std::vector<at::Tensor> moved;
      for (const at::Tensor& gradient : gradients) moved.push_back(gradient.to(stand_in(0)));
      moved[0] = moved[0].t().contiguous().t();
      moved[1] = moved[1].expand({4, 5});
      // Other ways of AdamW decay the parameter first, and with it a gradient that is the parameter.
      moved[2] = of(spec).exists() ? twins.there[2].detach() : twins.there[2].detach().clone();
      twins.on_device->step(moved);
      twins.on_cpu->step(std::vector<at::Tensor>{gradients[0], gradients[1].expand({4, 5}).contiguous(),
                                                 twins.here[2].detach().clone()});
    }
    twins.expect_equal();
    EXPECT_EQ(of(spec).calls() - before, of(spec).exists() ? 3 : 0);
  }
}

TEST_F(FusedOperators, LeaveParametersWithGapsToForeach) {
  for (const OptimizerSpec& spec : all_specs()) {
    SCOPED_TRACE(spec.kind);
    const at::Tensor value = randn({{6, 2}})[0], other = randn({{5}})[0];
    const at::Tensor memory = value.to(stand_in(0));
    const std::vector<at::Tensor> there = {memory.select(1, 1).detach().set_requires_grad(true),
                                           other.to(stand_in(0)).set_requires_grad(true)};
    const std::vector<at::Tensor> here = {leaf_of(value.select(1, 1)), leaf_of(other)};
    const auto on_device = spec.build(there), on_cpu = spec.build(here);
    const int before = of(spec).calls();
    for (int step = 0; step < 3; ++step) {
      const std::vector<at::Tensor> gradients = randn({{6}, {5}});
      on_device->step(std::vector<at::Tensor>{gradients[0].to(stand_in(0)), gradients[1].to(stand_in(0))});
      on_cpu->step(gradients);
    }
    EXPECT_TRUE(agree(there[0], here[0]));
    EXPECT_TRUE(agree(there[1], here[1]));
    EXPECT_TRUE(memory.select(1, 0).cpu().equal(value.select(1, 0))) << "the gaps are unchanged";
    EXPECT_EQ(of(spec).calls() - before, of(spec).exists() ? 3 : 0) << "for the other parameter";
  }
}

TEST_F(FusedOperators, LeaveParametersWhoseStateHasOtherStridesToForeach) {
  for (const OptimizerSpec& spec : all_specs()) {
    SCOPED_TRACE(spec.kind);
    const Twins twins(spec, randn({{4, 5}, {6}}), /*one_device=*/true);
    for (int step = 0; step < 3; ++step) twins.step(randn({{4, 5}, {6}}));
    twins.there[0].set_data(twins.there[0].detach().t().contiguous().t());
    const int before = of(spec).calls();
    for (int step = 0; step < 3; ++step) twins.step(randn({{4, 5}, {6}}));
    twins.expect_equal();
    EXPECT_EQ(of(spec).calls() - before, of(spec).exists() ? 3 : 0) << "for the other parameter";
  }
}

TEST_F(FusedOperators, StepParametersWithAndWithoutMomentumApart) {
  for (const auto foreach : {std::optional<bool>(), std::optional<bool>(true)}) {
    const OptimizerSpec spec = SGD{.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .foreach = foreach};
    for (std::size_t loaded = 0; loaded < 2; ++loaded) {
      const Twins twins(spec, randn({{4}, {5}}), /*one_device=*/true);
      const ParameterState state{{"step", at::scalar_tensor(0, at::kLong)},
                                 {"momentum_buffer", at::ones_like(twins.here[loaded].detach())}};
      twins.on_device->load_state(loaded, state);
      twins.on_cpu->load_state(loaded, state);
      const int before = of(spec).calls();
      for (int step = 0; step < 3; ++step) twins.step(randn({{4}, {5}}));
      twins.expect_equal();
      EXPECT_EQ(of(spec).calls() - before, of(spec).exists() && !foreach ? 2 + 1 + 1 : 0);
    }
  }
}

TEST_F(FusedOperators, AreNotCalledWhereFloatsCannotTellABetaFromOne) {
  const std::vector<OptimizerSpec> specs = {Adam{.lr = 0.01, .beta2 = 1 - 1e-9},
                                            AdamW{.lr = 0.01, .beta1 = 1 - 1e-9}};
  for (const OptimizerSpec& spec : specs) {
    SCOPED_TRACE(spec.kind);
    const Twins twins(spec, randn({{4}, {5}}), /*one_device=*/true);
    for (int step = 0; step < 3; ++step) twins.step(randn({{4}, {5}}));
    for (const at::Tensor& parameter : twins.there)
      EXPECT_TRUE(parameter.cpu().isfinite().all().item<bool>());
    EXPECT_EQ(of(spec).calls(), 0);
  }
}

TEST_F(FusedOperators, GetOnlyTensorsThatAllKernelsCanUpdate) {
  Tensors parameters = {at::ones({3}, at::kLong).to(stand_in(0))};
  const Tensors gradients = {parameters[0].clone()};
  std::vector<Tensors> slots = {{parameters[0].clone()}, {parameters[0].clone()}};
  const Operands<Tensors> on{parameters, gradients, slots.data(), 1};
  EXPECT_FALSE(run_fused_operator(Adam{}, on)) << "no kernel for this dtype";
  EXPECT_FALSE(run_fused_operator(SGD{.lr = 1}, on));
  EXPECT_EQ(adam_.calls() + sgd_.calls(), 0);
  EXPECT_TRUE(can_index_with_int(at::ones({1}).expand({(std::int64_t{1} << 31) - 1})));
  EXPECT_FALSE(can_index_with_int(at::ones({1}).expand({std::int64_t{1} << 31})));
}

TEST_F(FusedOperators, RejectAGradientBeforeAnyParameterChanges) {
  for (const OptimizerSpec& spec : all_specs()) {
    const Twins twins(spec, randn({{3}, {4}}), /*one_device=*/true);
    const at::Tensor before = twins.there[0].detach().clone();
    EXPECT_THAT(invalid_text([&] {
                  twins.on_device->step(
                      std::vector<at::Tensor>{at::ones({3}).to(stand_in(0)), at::ones({4}).to(stand_in(1))});
                }),
                HasSubstr("parameter 1"));
    EXPECT_TRUE(twins.there[0].equal(before));
    EXPECT_THAT(twins.on_device->state(0), IsEmpty());
    EXPECT_EQ(twins.there[0]._version(), 0U);
  }
}

class MissingOperators : public ::testing::Test {
 protected:
  void SetUp() override { StandInStreams::get().reset(); }
  static void expect_steps(const OptimizerSpec& spec) {
    const Twins twins(spec, {at::randn({3, 4}), at::randn({5}), at::randn({5})});
    for (int step = 0; step < 5; ++step) twins.step({at::randn({3, 4}), at::randn({5}), at::randn({5})});
    twins.expect_equal();
    for (const at::Tensor& parameter : twins.there) EXPECT_EQ(parameter._version(), 5U);
  }
};

TEST_F(MissingOperators, LeaveTheStepToOtherOperations) {
  const at::Tensor like = at::ones({1}).to(stand_in(0));
  EXPECT_FALSE(has_fused_operator(Adam{}, like)) << "the stand-in's fallback is not a kernel";
  EXPECT_FALSE(has_fused_operator(RMSprop{}, like));
  for (const OptimizerSpec& spec : all_specs()) {
    SCOPED_TRACE(spec.kind);
    expect_steps(spec);
  }
}

TEST_F(MissingOperators, MayAlsoThrowNotImplementedError) {
  const auto refuse = [](const c10::OperatorHandle&, torch::jit::Stack&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "not implemented for this dtype");
  };
  const StandInOperator adam("_fused_adam_", refuse), adamw("_fused_adamw_", refuse),
      sgd("_fused_sgd_", refuse);
  for (const OptimizerSpec& spec : all_specs()) {
    SCOPED_TRACE(spec.kind);
    expect_steps(spec);
  }
  EXPECT_GT(adam.calls(), 0);
  EXPECT_EQ(sgd.calls() > 0, sgd.exists());
}

TEST_F(MissingOperators, AreNotMistakenForOtherErrors) {
  const StandInOperator adam("_fused_adam_", [](const c10::OperatorHandle&, torch::jit::Stack&) {
    TORCH_CHECK(false, "the device has no memory left");
  });
  const at::Tensor parameter = at::ones({3}).to(stand_in(0)).set_requires_grad(true);
  const auto optimizer = Adam{}.build({parameter});
  EXPECT_THROW(optimizer->step(std::vector<at::Tensor>{at::ones({3}).to(stand_in(0))}), c10::Error);
  EXPECT_TRUE(parameter.cpu().equal(at::ones({3})));
}

}  // namespace
}  // namespace torchspan::optim::fused_operators_test
