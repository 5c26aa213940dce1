// Runs gpt_sharded as users do, on a text that repeats, with little memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "char_transformer/example_program.h"
#include "char_transformer/gpt_options.h"
#include "char_transformer/sharded_options.h"
#include "char_transformer/stage_options.h"
#include "tests/support/errors.h"

namespace char_transformer::sharded_test {
namespace {

using ::testing::HasSubstr;

class GptSharded : public ExampleProgram {
 protected:
  /// 25 million parameters: 400 MiB with gradients and the state of Adam.
  GptSharded()
      : ExampleProgram("gpt_sharded",
                       {{"--width", "256"},
                        {"--blocks", "32"},
                        {"--heads", "4"},
                        {"--context", "16"},
                        {"--batch", "4"},
                        {"--steps", "4"}},
                       "the whale, the white whale; call me ") {}
};

TEST_F(GptSharded, TrainsOnTwoRanksWhatDoesNotFitOne) {
  const double whole = loss_of(run(1, {}));
  const Outcome one = run(1, {{"--memory", "340"}});
  EXPECT_NE(one.exit_code, 0);
  EXPECT_THAT(one.output, HasSubstr("a world of 1 needs more than 340 MiB for each rank: start more ranks"));
  EXPECT_NEAR(loss_of(run(2, {{"--memory", "340"}})), whole, 0.01);
}

TEST_F(GptSharded, ComputesInBfloat16) {
  EXPECT_NEAR(loss_of(run(2, {{"--blocks", "2"}, {"--bfloat16", ""}})), loss_of(run(2, {{"--blocks", "2"}})),
              0.2);
}

TEST_F(GptSharded, ReportsInvalidOptions) {
  EXPECT_THAT(run(2, {{"--batch", "3"}}).output, HasSubstr("--batch 3 is not a multiple of 2 ranks"));
}

TEST(WorldSize, OfAnOpenWorldIsRefused) {
  using torchspan::testing::invalid_text;
  for (const std::string& text :
       {invalid_text([] { check(ShardedOptions(), 0); }), invalid_text([] { check(GptOptions(), 0); }),
        invalid_text([] { check(StageOptions(), 0); })}) {
    EXPECT_THAT(text, HasSubstr("this one is open (WORLD_SIZE is 0)"));
  }
}

}  // namespace
}  // namespace char_transformer::sharded_test
