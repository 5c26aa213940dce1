#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <sstream>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/optim/adam.h>
#include <torchspan/optim/grad_scaler.h>
#include <torchspan/optim/sgd.h>

#include "tests/support/errors.h"

namespace torchspan::optim::grad_scaler_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::invalid_text;

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

}  // namespace
}  // namespace torchspan::optim::grad_scaler_test
