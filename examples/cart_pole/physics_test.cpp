#include "cart_pole/physics.h"

#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

namespace cart_pole::physics_test {
namespace {

/// Both equations of motion, which the accelerations of a step must satisfy: of the cart with its pole, and of the pole
/// about its joint (a uniform rod of length 2 l: 4/3 l).
TEST(Carts, ObeyTheEquationsOfMotion) {
  const at::Tensor before = at::rand({50, 4}, at::kDouble) * at::tensor({2.0, 2.0, 0.2, 2.0}, at::kDouble) -
                            at::tensor({1.0, 1.0, 0.1, 1.0}, at::kDouble);
  Carts carts(50, 1);
  carts.set_states(before);
  const at::Tensor actions = at::randint(2, {50}, at::kLong);
  const Carts::Ended ended = carts.step(actions);
  ASSERT_FALSE(ended.failed.any().item<bool>());
  const at::Tensor change = (carts.states() - before) / 0.02;
  for (std::int64_t i = 0; i < 50; ++i) {
    const double angle = before[i][2].item<double>(), spin = before[i][3].item<double>();
    const double acceleration = change[i][1].item<double>(), spin_change = change[i][3].item<double>();
    const double force = actions[i].item<std::int64_t>() == 1 ? 10 : -10;
    EXPECT_NEAR(change[i][0].item<double>(), before[i][1].item<double>(), 1e-9);
    EXPECT_NEAR(change[i][2].item<double>(), spin, 1e-9);
    EXPECT_NEAR(
        1.1 * acceleration + 0.05 * spin_change * std::cos(angle) - 0.05 * spin * spin * std::sin(angle),
        force, 1e-7);
    EXPECT_NEAR(4.0 / 3 * 0.5 * spin_change + acceleration * std::cos(angle), 9.8 * std::sin(angle), 1e-7);
  }
}

TEST(Carts, FailOutsideTheirRangeAndBeginAnew) {
  Carts carts(4, 2);
  carts.set_states(
      at::tensor({2.399, 2.0, 0.0, 0.0, -2.399, -2.0, 0.0, 0.0, 0.0, 0.0, 0.2, 2.0, 0.0, 0.0, 0.0, 0.0},
                 at::kDouble)
          .reshape({4, 4}));
  const Carts::Ended ended = carts.step(at::tensor({1, 0, 0, 1}, at::kLong));
  EXPECT_TRUE(ended.failed.equal(at::tensor({1, 1, 1, 0}, at::kLong).to(at::kBool)));
  EXPECT_FALSE(ended.complete.any().item<bool>());
  EXPECT_LE(carts.states().slice(0, 0, 3).abs().max().item<double>(), 0.05);
}

/// Pushes against the fall: the simplest policy that balances for a while.
TEST(Carts, EndAnEpisodeAfterItsLongestTime) {
  Carts carts(1, 3);
  for (std::int64_t step = 1; step <= kLongestEpisode; ++step) {
    carts.set_states(at::zeros({1, 4}, at::kDouble));  // held upright
    const Carts::Ended ended = carts.step(at::ones({1}, at::kLong));
    EXPECT_EQ(ended.complete.item<bool>(), step == kLongestEpisode);
    EXPECT_FALSE(ended.failed.item<bool>());
  }
}

}  // namespace
}  // namespace cart_pole::physics_test
