#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "data_parallel/passes.h"

namespace torchspan::data_parallel::local_pass_test {
namespace {

using Slots = std::vector<std::size_t>;

TEST(LocalPass, IsStrayFromItsFirstGradientUntilItReachesAnOutput) {
  const auto end = std::make_shared<engine::PassEnd>(1);
  LocalPass pass(3);
  EXPECT_TRUE(pass.add(end, 1, false));
  EXPECT_FALSE(pass.add(end, 2, false));
  EXPECT_TRUE(pass.is_stray(end.get()));
  EXPECT_FALSE(pass.begin(end)) << "the pass is known already";
  EXPECT_FALSE(pass.is_stray(end.get()));
  EXPECT_EQ(pass.take(end), (Slots{1, 2}));
}

TEST(LocalPass, GivesItsGradientsOnlyToARoundOfTheSamePass) {
  const auto first = std::make_shared<engine::PassEnd>(1), second = std::make_shared<engine::PassEnd>(2);
  LocalPass pass(2);
  EXPECT_TRUE(pass.begin(first));
  EXPECT_FALSE(pass.add(first, 0, false));
  EXPECT_TRUE(pass.take(second).empty());
  EXPECT_TRUE(pass.take(first).empty()) << "take() forgets the pass";
}

TEST(LocalPass, IsStrayOnlyByGradientsThatNoOtherWrapperExpects) {
  const auto end = std::make_shared<engine::PassEnd>(1);
  LocalPass pass(3);
  EXPECT_FALSE(pass.add(end, 0, true));
  EXPECT_FALSE(pass.is_stray(end.get()));
  EXPECT_FALSE(pass.has_begun(end.get()));
  EXPECT_TRUE(pass.add(end, 1, false));
  EXPECT_FALSE(pass.add(end, 2, false));
  EXPECT_TRUE(pass.is_stray(end.get()));
  EXPECT_FALSE(pass.begin(end));
  EXPECT_TRUE(pass.has_begun(end.get()));
  EXPECT_EQ(pass.take(end), (Slots{0, 1, 2}));
  EXPECT_FALSE(pass.has_begun(end.get()));
}

TEST(LocalPass, ForgetsAPassAtItsEnd) {
  const auto first = std::make_shared<engine::PassEnd>(1), second = std::make_shared<engine::PassEnd>(2);
  LocalPass pass(2);
  EXPECT_TRUE(pass.begin(first));
  EXPECT_FALSE(pass.add(first, 0, false));
  pass.forget(second.get());
  EXPECT_FALSE(pass.begin(first));
  pass.forget(first.get());
  EXPECT_TRUE(pass.begin(second));
  EXPECT_FALSE(pass.add(second, 1, false));
  EXPECT_EQ(pass.take(second), (Slots{1}));
}

}  // namespace
}  // namespace torchspan::data_parallel::local_pass_test
