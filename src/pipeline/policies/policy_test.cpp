#include "pipeline/policies/policy.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>

namespace torchspan::pipeline::policy_test {
namespace {

using schedule::Action;
using schedule::ActionKind;

constexpr Action forward(int stage, int micro_batch) { return {ActionKind::kForward, stage, micro_batch}; }
constexpr Action backward(int stage, int micro_batch) { return {ActionKind::kBackward, stage, micro_batch}; }

TEST(TablePolicy, KeepsTheRowsOrderWhateverTheOrderOfArrival) {
  const std::vector<Action> row{forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)};
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<Action> arriving = row;
    std::shuffle(arriving.begin(), arriving.end(), random);
    const auto policy = make_table_policy(row);
    std::vector<Action> ran;
    for (const Action& action : arriving) {
      policy->became_ready(action);
      while (const auto next = policy->next()) ran.push_back(*next);
    }
    EXPECT_EQ(ran, row);
    EXPECT_EQ(policy->next(), std::nullopt);
  }
}

TEST(TablePolicy, WaitsForItsNextActionThoughOthersAreReady) {
  const auto policy = make_table_policy({forward(0, 0), forward(0, 1)});
  policy->became_ready(forward(0, 1));
  EXPECT_EQ(policy->next(), std::nullopt);
  policy->became_ready(forward(0, 0));
  EXPECT_EQ(policy->next(), forward(0, 0));
  EXPECT_EQ(policy->next(), forward(0, 1));
}

TEST(TablePolicy, PredictsTheNextBackward) {
  const auto policy = make_table_policy({forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)});
  EXPECT_EQ(policy->next_backward(), backward(0, 0));
  for (const Action& action : {forward(0, 0), forward(0, 1), backward(0, 0)}) {
    policy->became_ready(action);
    policy->next();
  }
  EXPECT_EQ(policy->next_backward(), backward(0, 1));
  policy->became_ready(backward(0, 1));
  policy->next();
  EXPECT_EQ(policy->next_backward(), std::nullopt);
}

TEST(TablePolicy, OfAnEmptyRowHasNothing) {
  const auto policy = make_table_policy({});
  EXPECT_EQ(policy->next(), std::nullopt);
  EXPECT_EQ(policy->next_backward(), std::nullopt);
}

TEST(ArrivalPolicy, RunsActionsInOrderOfArrival) {
  const auto policy = make_arrival_policy({});
  const std::vector<Action> arriving{forward(2, 1), backward(1, 0), forward(2, 0), backward(1, 1)};
  for (const Action& action : arriving) policy->became_ready(action);
  for (const Action& action : arriving) EXPECT_EQ(policy->next(), action);
  EXPECT_EQ(policy->next(), std::nullopt);
}

TEST(ArrivalPolicy, AdmitsNoMoreThanItsLimitUntilABackwardFinishes) {
  const auto policy = make_arrival_policy({.layer_range = 0, .max_in_flight = 2});
  for (int i = 0; i < 4; ++i) policy->became_ready(forward(0, i));
  EXPECT_EQ(policy->next(), forward(0, 0));
  EXPECT_EQ(policy->next(), forward(0, 1));
  EXPECT_EQ(policy->next(), std::nullopt);
  policy->became_ready(backward(0, 1));
  EXPECT_EQ(policy->next(), backward(0, 1));
  EXPECT_EQ(policy->next(), forward(0, 2));
  EXPECT_EQ(policy->next(), std::nullopt);
}

TEST(ArrivalPolicy, ContinuesOnlyAfterTheBackwardOfItsLayerRange) {
  const auto policy = make_arrival_policy({.layer_range = 0, .max_in_flight = 1});
  policy->became_ready(forward(0, 0));
  policy->became_ready(forward(0, 1));
  EXPECT_EQ(policy->next(), forward(0, 0));
  policy->became_ready(forward(2, 0));
  policy->became_ready(backward(2, 0));
  EXPECT_EQ(policy->next(), forward(2, 0)) << "a later layer range holds the micro-batch already";
  EXPECT_EQ(policy->next(), backward(2, 0));
  EXPECT_EQ(policy->next(), std::nullopt);
  policy->became_ready(backward(0, 0));
  EXPECT_EQ(policy->next(), backward(0, 0));
  EXPECT_EQ(policy->next(), forward(0, 1));
}

TEST(ArrivalPolicy, FinishesAdmittedMicroBatchesBeforeItAdmitsMore) {
  const auto policy = make_arrival_policy({.layer_range = 0, .max_in_flight = 4});
  policy->became_ready(forward(0, 0));
  EXPECT_EQ(policy->next(), forward(0, 0));
  policy->became_ready(forward(0, 1));
  policy->became_ready(backward(0, 0));
  EXPECT_EQ(policy->next(), backward(0, 0));
  EXPECT_EQ(policy->next(), forward(0, 1));
}

TEST(ArrivalPolicy, WithoutBackwardsContinuesByCredit) {
  const auto policy = make_arrival_policy({.layer_range = 0, .max_in_flight = 1, .backwards = false});
  for (int i = 0; i < 3; ++i) policy->became_ready(forward(0, i));
  EXPECT_EQ(policy->next(), forward(0, 0));
  EXPECT_EQ(policy->next(), std::nullopt);
  policy->credit();
  EXPECT_EQ(policy->next(), forward(0, 1));
  EXPECT_EQ(policy->next(), std::nullopt);
}

TEST(ArrivalPolicy, WithoutALimitAdmitsEverything) {
  const auto policy = make_arrival_policy({.layer_range = 0, .max_in_flight = 0});
  for (int i = 0; i < 100; ++i) policy->became_ready(forward(0, i));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(policy->next(), forward(0, i));
}

TEST(ArrivalPolicy, KeepsItsLimitUnderRandomArrivals) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    std::mt19937_64 random(seed);
    const int limit = 1 + static_cast<int>(random() % 4), micro_batches = 12;
    const auto policy = make_arrival_policy({.layer_range = 0, .max_in_flight = limit});
    for (int i = 0; i < micro_batches; ++i) policy->became_ready(forward(0, i));
    std::vector<int> inside;
    int ran = 0;
    while (ran < 2 * micro_batches) {
      if (const auto action = policy->next()) {
        ++ran;
        if (action->kind == ActionKind::kForward) {
          inside.push_back(action->micro_batch);
        } else {
          std::erase(inside, action->micro_batch);
        }
        ASSERT_LE(static_cast<int>(inside.size()), limit) << "seed " << seed;
        continue;
      }
      ASSERT_FALSE(inside.empty()) << "seed " << seed << ": no action, although no micro-batch is in flight";
      policy->became_ready(backward(0, inside[random() % inside.size()]));
    }
  }
}

}  // namespace
}  // namespace torchspan::pipeline::policy_test
