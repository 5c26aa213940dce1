#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/pipeline/layers.h>

#include "tests/support/errors.h"

namespace torchspan::pipeline::skips_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::invalid_text;

// peer suite: pipe test_stash_pop `stash`, `pop`, `declare_but_not_use`, `stash_not_declared`,
//   `pop_not_declared`, `pop_not_stashed`, `stash_none`: same
TEST(Skips, ReturnStashedTensorsWhenPopped) {
  const at::Tensor in = at::ones({2});
  Skips skips({{"in", in}}, {"out"});
  EXPECT_TRUE(skips.pop("in").is_same(in));
  skips.stash("out", in * 2);
  EXPECT_EQ(skips.unused_keys(), "");
  EXPECT_TRUE(skips.stashed().at("out").equal(in * 2));
}

TEST(Skips, MayBeUndefined) {
  Skips skips({{"in", at::Tensor()}}, {"out"});
  EXPECT_FALSE(skips.pop("in").defined());
  skips.stash("out", at::Tensor());
  EXPECT_EQ(skips.unused_keys(), "") << "nothing is something too, if it was stashed";
  EXPECT_FALSE(skips.stashed().at("out").defined());
}

TEST(Skips, ThatWereNotDeclaredAreRefused) {
  Skips skips({{"in", at::ones({1})}}, {"out"});
  EXPECT_THAT(invalid_text([&] { skips.stash("other", at::ones({1})); }),
              HasSubstr("'other' is stashed but was not declared by stashes(\"other\")"));
  EXPECT_THAT(invalid_text([&] { skips.pop("other"); }), HasSubstr("not declared by pops(\"other\")"));
  EXPECT_THAT(invalid_text([&] { skips.stash("in", at::ones({1})); }), HasSubstr("stashes(\"in\")"));
  EXPECT_THAT(invalid_text([&] { skips.pop("out"); }), HasSubstr("pops(\"out\")"));
}

TEST(Skips, CanBePoppedOnce) {
  Skips skips({{"in", at::ones({1})}}, {"out"});
  skips.pop("in");
  skips.stash("out", at::ones({1}));
  EXPECT_THAT(invalid_text([&] { skips.pop("in"); }), HasSubstr("popped for the second time"));
  EXPECT_THAT(invalid_text([&] { skips.stash("out", at::zeros({1})); }),
              HasSubstr("stashed for the second time"));
  EXPECT_TRUE(skips.stashed().at("out").equal(at::ones({1}))) << "the first one stays";
}

TEST(Skips, ThatWereDeclaredMustBeUsed) {
  Skips skips({{"in", at::ones({1})}}, {"out"});
  EXPECT_EQ(skips.unused_keys(),
            "'out' was declared by stashes() but not stashed; 'in' was declared by pops() but not popped");
}

}  // namespace
}  // namespace torchspan::pipeline::skips_test
