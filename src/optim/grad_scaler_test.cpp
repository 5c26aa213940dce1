#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/grad_scaler.h>

#include "tests/support/errors.h"
#include "tests/support/stand_in_operators.h"

namespace torchspan::optim::grad_scaler_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torchspan::testing::invalid_text;
using torchspan::testing::stand_in;
using torchspan::testing::StandInOperator;
using torchspan::testing::StandInStreams;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Tensor parameter(std::vector<double> values = {1, -2, 3}) {
  return torch::tensor(values, torch::kDouble).set_requires_grad(true);
}

void set_gradient(const at::Tensor& parameter, double value) {
  parameter.mutable_grad() = at::full_like(parameter.detach(), value);
}

/// One iteration whose first gradient is `value` after division by the scale. Returns whether it stepped.
bool iterate(GradScaler& scaler, Optimizer& optimizer, const at::Tensor& parameter, double value) {
  set_gradient(parameter, value * scaler.get_scale());
  const bool stepped = scaler.step(optimizer);
  scaler.update();
  return stepped;
}

TEST(GradScaler, TrainsAsWithoutScaling) {
  at::Tensor scaled = parameter(), plain = parameter();
  Optimizer optimizer({scaled}, Adam{.lr = 0.1});
  torch::optim::Adam oracle({plain}, torch::optim::AdamOptions(0.1));
  GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    oracle.zero_grad();
    scaler.scale(scaled.pow(2).sum()).backward();
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    plain.pow(2).sum().backward();
    oracle.step();
  }
  EXPECT_TRUE(at::allclose(scaled, plain, 1e-12, 1e-12)) << scaled << plain;
  EXPECT_EQ(scaler.get_scale(), 1024 * 8) << "raised after every third step";
}

TEST(GradScaler, StepsOptimizersOfLibTorch) {
  at::Tensor value = parameter();
  torch::optim::SGD optimizer({value}, torch::optim::SGDOptions(0.5));
  GradScaler scaler({.init_scale = 8});
  set_gradient(value, 16);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(at::allclose(value.detach(), torch::tensor({0.0, -3.0, 2.0}, torch::kDouble)));
  scaler.update();
  set_gradient(value, kInfinity);
  EXPECT_FALSE(scaler.step(optimizer));
  EXPECT_TRUE(at::allclose(value.detach(), torch::tensor({0.0, -3.0, 2.0}, torch::kDouble)));
}

TEST(GradScaler, RefusesParametersThatAreSteppedInBackward) {
  const at::Tensor weight = torch::ones({2}).set_requires_grad(true);
  Optimizer optimizer({weight}, SGD{.lr = 1});
  GradScaler scaler({.init_scale = 8});
  {
    const BackwardSteps steps = optimizer.step_in_backward();
    EXPECT_THAT(torchspan::testing::error_text([&] { scaler.step(optimizer); }),
                ::testing::HasSubstr("step_in_backward() steps parameter 0 of 1"));
  }
  scaler.scale(weight.sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(weight.equal(torch::zeros({2})));
}

TEST(GradScaler, DividesAGradientOnceWhoseParameterIsListedTwice) {
  at::Tensor value = parameter();
  torch::optim::SGD optimizer({value, value}, torch::optim::SGDOptions(0.5));
  GradScaler scaler({.init_scale = 8});
  set_gradient(value, 16);
  scaler.unscale_(optimizer);
  EXPECT_EQ(value.grad()[0].item<double>(), 2);
}

TEST(GradScaler, SkipsStepsWithInfiniteGradientsAndLowersTheScale) {
  for (const double bad : {kInfinity, -kInfinity, kNan}) {
    at::Tensor first = parameter(), second = parameter();
    Optimizer optimizer({first, second}, SGD{.lr = 0.1});
    const at::Tensor before = first.detach().clone();
    GradScaler scaler({.init_scale = 64, .backoff_factor = 0.25, .growth_interval = 2});
    set_gradient(first, 1);
    set_gradient(second, 1);
    second.mutable_grad()[1] = bad;
    EXPECT_FALSE(scaler.step(optimizer));
    EXPECT_TRUE(first.equal(before)) << "a gradient of another parameter was not finite";
    EXPECT_TRUE(second.equal(before));
    EXPECT_EQ(scaler.get_scale(), 64) << "until update()";
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 16);
  }
}

TEST(GradScaler, CountsStepsInARowBeforeItRaisesTheScale) {
  at::Tensor value = parameter();
  Optimizer optimizer({value}, SGD{.lr = 0.1});
  GradScaler scaler({.init_scale = 4, .growth_factor = 3, .growth_interval = 2});
  EXPECT_TRUE(iterate(scaler, optimizer, value, 1));
  EXPECT_EQ(scaler.get_scale(), 4);
  EXPECT_TRUE(iterate(scaler, optimizer, value, 1));
  EXPECT_EQ(scaler.get_scale(), 12);
  EXPECT_TRUE(iterate(scaler, optimizer, value, 1));
  EXPECT_FALSE(iterate(scaler, optimizer, value, kInfinity));
  EXPECT_EQ(scaler.get_scale(), 6);
  EXPECT_TRUE(iterate(scaler, optimizer, value, 1));
  EXPECT_EQ(scaler.get_scale(), 6) << "the skipped step restarted the count";
  EXPECT_TRUE(iterate(scaler, optimizer, value, 1));
  EXPECT_EQ(scaler.get_scale(), 18);
}

TEST(GradScaler, KeepsTheScaleWithinTheRangeOfFloat) {
  at::Tensor value = parameter();
  Optimizer optimizer({value}, SGD{.lr = 0});
  GradScaler scaler({.init_scale = 3e38, .growth_interval = 1});
  set_gradient(value, 1);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 3e38);
}

TEST(GradScaler, ScalesLossesOfHalfPrecisionAsFloat) {
  const GradScaler scaler;
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    const at::Tensor scaled = scaler.scale(torch::full({}, 2, dtype));
    EXPECT_EQ(scaled.scalar_type(), at::kFloat);
    EXPECT_EQ(scaled.item<double>(), 131072) << "above the range of half";
  }
}

TEST(GradScaler, LetsClippingSeeUnscaledGradients) {
  at::Tensor value = parameter();
  Optimizer optimizer({value}, SGD{.lr = 1});
  GradScaler scaler({.init_scale = 256});
  set_gradient(value, 256);
  scaler.unscale_(optimizer);
  EXPECT_NEAR(optimizer.clip_grad_norm(1), std::sqrt(3), 1e-12);
  EXPECT_THAT(invalid_text([&] { scaler.unscale_(optimizer); }), HasSubstr("already called"));
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_THAT(invalid_text([&] { scaler.step(optimizer); }), HasSubstr("step() was already called"));
  EXPECT_THAT(invalid_text([&] { scaler.unscale_(optimizer); }), HasSubstr("after step()"));
  scaler.update();
}

TEST(GradScaler, UnscalesSparseGradientsAndSkipsParametersWithoutGradient) {
  torch::nn::Embedding rows(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  const at::Tensor before = rows->weight.detach().clone();
  at::Tensor unused = parameter();
  Optimizer optimizer({rows->weight, unused}, SGD{.lr = 1});
  GradScaler scaler({.init_scale = 512});
  scaler.scale(rows(torch::tensor({1, 1, 3})).sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer));
  const at::Tensor moved = before - rows->weight.detach();
  EXPECT_TRUE(at::allclose(moved.sum(1), torch::tensor({0.0, 4.0, 0.0, 2.0})));
}

TEST(GradScaler, SkipsWhereAnotherRankFoundAnInfiniteGradient) {
  at::Tensor value = parameter();
  Optimizer optimizer({value}, SGD{.lr = 1});
  std::vector<bool> findings;
  bool others = true;
  GradScaler scaler({.init_scale = 2, .agree = [&](bool found) {
                       findings.push_back(found);
                       return found || others;
                     }});
  EXPECT_FALSE(iterate(scaler, optimizer, value, 1));
  others = false;
  EXPECT_FALSE(iterate(scaler, optimizer, value, kNan));
  EXPECT_TRUE(iterate(scaler, optimizer, value, 1));
  EXPECT_EQ(findings, (std::vector<bool>{false, true, false}));
}

TEST(GradScaler, DividesNoGradientTwiceAfterAnError) {
  at::Tensor value = parameter(), other = parameter();
  Optimizer optimizer({value}, SGD{.lr = 1}), second({other}, SGD{.lr = 1});
  bool broken = true;
  GradScaler scaler({.init_scale = 4, .growth_interval = 2, .agree = [&](bool found) {
                       if (broken) throw std::runtime_error("a rank is gone");
                       return found;
                     }});
  const at::Tensor before = value.detach().clone();
  set_gradient(value, 8);
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  broken = false;
  EXPECT_THAT(invalid_text([&] { scaler.step(optimizer); }), HasSubstr("an earlier unscale_() failed"));
  EXPECT_THAT(invalid_text([&] { scaler.unscale_(optimizer); }), HasSubstr("compute new gradients"));
  EXPECT_EQ(value.grad()[0].item<double>(), 2) << "divided once";
  EXPECT_TRUE(value.detach().equal(before));
  set_gradient(other, kInfinity);
  EXPECT_FALSE(scaler.step(second));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4) << "kept";
  EXPECT_TRUE(iterate(scaler, optimizer, value, 1));
  EXPECT_TRUE(value.detach().equal(before - 1));
  EXPECT_EQ(scaler.get_scale(), 4) << "the failed iteration does not count";
  EXPECT_TRUE(iterate(scaler, optimizer, value, 1));
  EXPECT_EQ(scaler.get_scale(), 8);
}

TEST(GradScaler, DoesNothingWhenItIsDisabled) {
  at::Tensor value = parameter({1});
  Optimizer optimizer({value}, SGD{.lr = 1});
  GradScaler scaler({.enabled = false});
  const at::Tensor loss = value.sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  set_gradient(value, kInfinity);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_TRUE(std::isinf(value.item<double>()));
}

TEST(GradScaler, SavesAndLoadsItsState) {
  at::Tensor value = parameter();
  Optimizer optimizer({value}, SGD{.lr = 0.1});
  GradScaler scaler({.init_scale = 4, .growth_interval = 3});
  for (int step = 0; step < 2; ++step) EXPECT_TRUE(iterate(scaler, optimizer, value, 1));
  std::stringstream file;
  torch::save(scaler.state_dict(), file);
  StateDict state;
  torch::load(state, file);
  GradScaler resumed({.growth_interval = 3});
  resumed.load_state_dict(state);
  EXPECT_EQ(resumed.get_scale(), 4);
  EXPECT_TRUE(iterate(resumed, optimizer, value, 1));
  EXPECT_EQ(resumed.get_scale(), 8) << "the third step in a row";
  StateDict wrong;
  wrong.insert("scale", torch::tensor(-1.0));
  EXPECT_THAT(invalid_text([&] { resumed.load_state_dict(wrong); }), HasSubstr("'growth_tracker'"));
  wrong.insert("growth_tracker", torch::tensor(0));
  EXPECT_THAT(invalid_text([&] { resumed.load_state_dict(wrong); }), HasSubstr("scale -1"));
  EXPECT_EQ(resumed.get_scale(), 8);
}

TEST(GradScaler, RejectsOptionsAndCallsThatMakeNoSense) {
  EXPECT_THAT(invalid_text([] { GradScaler scaler({.init_scale = 0}); }), HasSubstr("init_scale = 0"));
  EXPECT_THAT(invalid_text([] { GradScaler scaler({.growth_factor = 1}); }), HasSubstr("growth_factor = 1"));
  EXPECT_THAT(invalid_text([] { GradScaler scaler({.backoff_factor = 1}); }), HasSubstr("backoff_factor"));
  EXPECT_THAT(invalid_text([] { GradScaler scaler({.growth_interval = 0}); }), HasSubstr("growth_interval"));
  GradScaler scaler;
  EXPECT_THAT(invalid_text([&] { scaler.update(); }), HasSubstr("no step() or unscale_()"));
  EXPECT_THAT(invalid_text([&] { scaler.update(kNan); }), HasSubstr("new scale"));
  scaler.update(16);
  EXPECT_EQ(scaler.get_scale(), 16);
}

/// Parameters of several dtypes on both stand-in devices, whose gradients are 512 divided by the scale.
class ScalerOnDevices : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int device = 0; device < 2; ++device) {
      for (const auto dtype : {at::kFloat, at::kFloat, at::kHalf, at::kDouble, at::kBFloat16})
        parameters_.push_back(at::ones({2, 3}, dtype).to(stand_in(device)).detach().set_requires_grad(true));
    }
    parameters_.push_back(at::ones({0}).to(stand_in(0)).set_requires_grad(true));
    set_gradients();
    StandInStreams::get().reset();
  }
  void TearDown() override { EXPECT_THAT(StandInStreams::get().take_races(), IsEmpty()); }
  void set_gradients() const {
    for (const at::Tensor& parameter : parameters_) set_gradient(parameter, 512);
  }
  /// Steps once over gradients, all finite but for the one of parameter `bad`, and checks values and waits.
  void expect_step(std::optional<std::size_t> bad, double value = kInfinity) {
    SCOPED_TRACE(::testing::Message() << "parameter " << (bad ? std::to_string(*bad) : "none"));
    set_gradients();
    if (bad) {
      const at::Tensor row = parameters_[*bad].grad().select(0, 1);
      row.fill_(value);
    }
    std::vector<at::Tensor> before;
    for (const at::Tensor& parameter : parameters_) before.push_back(parameter.detach().cpu().clone());
    Optimizer optimizer(parameters_, SGD{.lr = 0.5});
    GradScaler scaler({.init_scale = 512});
    const std::size_t waits = StandInStreams::get().host_waits();
    EXPECT_EQ(scaler.step(optimizer), !bad.has_value());
    scaler.update();
    EXPECT_EQ(StandInStreams::get().host_waits() - waits, 1U) << "one wait for both devices";
    EXPECT_EQ(scaler.get_scale(), bad ? 256 : 512);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      EXPECT_TRUE(parameters_[i].cpu().equal(bad ? before[i] : before[i] - 0.5)) << i;
      const at::Tensor gradient = parameters_[i].grad().cpu();
      EXPECT_TRUE(bad == i || gradient.equal(at::ones_like(gradient))) << i;
    }
  }

  std::vector<at::Tensor> parameters_;
};

TEST_F(ScalerOnDevices, WaitsOnceInAStep) {
  expect_step(std::nullopt);
  for (std::size_t bad = 0; bad < 10; ++bad) expect_step(bad);
  expect_step(9, kNan);
}

TEST_F(ScalerOnDevices, UnscalesAndChecksTogetherWhereLibTorchCan) {
  const StandInOperator unscale = torchspan::testing::stand_in_check_and_unscale();
  expect_step(std::nullopt);
  EXPECT_EQ(unscale.calls(), 4) << "floats and halves of two devices";
  for (std::size_t bad = 0; bad < 10; ++bad) expect_step(bad, bad % 2 == 0 ? -kInfinity : kNan);
}

TEST_F(ScalerOnDevices, UnscalesOnceIfTheOperatorIsNotImplemented) {
  const StandInOperator unscale("_amp_foreach_non_finite_check_and_unscale_",
                                [](const c10::OperatorHandle&, torch::jit::Stack&) {
                                  TORCH_CHECK_NOT_IMPLEMENTED(false, "not implemented for this dtype");
                                });
  expect_step(std::nullopt);
  EXPECT_EQ(unscale.calls(), 4);
  expect_step(7);
}

TEST_F(ScalerOnDevices, SkipsWhereAnotherRankFoundAnInfiniteGradient) {
  const StandInOperator unscale = torchspan::testing::stand_in_check_and_unscale();
  Optimizer optimizer(parameters_, SGD{.lr = 0.5});
  GradScaler scaler({.init_scale = 512, .agree = [](bool found) { return !found; }});
  EXPECT_FALSE(scaler.step(optimizer));
  EXPECT_TRUE(parameters_[0].cpu().equal(at::ones({2, 3})));
}

TEST_F(ScalerOnDevices, UnscalesSparseGradients) {
  const StandInOperator unscale = torchspan::testing::stand_in_check_and_unscale();
  const at::Tensor rows = at::ones({4, 2}).set_requires_grad(true), dense = parameters_[0];
  for (const double value : {512.0, kInfinity}) {
    rows.mutable_grad() =
        at::_sparse_coo_tensor_unsafe(torch::tensor({{1, 1}}), at::full({2, 2}, value), {4, 2});
    set_gradient(dense, 512);
    Optimizer optimizer({rows, dense}, SGD{.lr = 0.5});
    GradScaler scaler({.init_scale = 512});
    EXPECT_EQ(scaler.step(optimizer), std::isfinite(value));
    EXPECT_EQ(rows[1][0].item<double>(), 0) << "stepped once by 0.5 times the sum of two gradients";
    EXPECT_EQ(dense.cpu()[0][0].item<double>(), 0.5);
  }
}

}  // namespace
}  // namespace torchspan::optim::grad_scaler_test
