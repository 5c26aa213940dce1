// Searches random schedules of the commit rule: crashes between any two messages or operations, restarts, ranks that
// are late, lost answers. TORCHSPAN_CASES sets how many.
#include <array>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <random>

#include "quorum/rule_world.h"
#include "tests/support/environment.h"

namespace torchspan::quorum::testing::rule_search_test {
namespace {

/// Weights of the actions; some schedules have no crashes, some no late ranks, so that failures that need neither show
/// without them.
std::vector<RuleWorld::Action> choices_of(std::mt19937_64& random) {
  std::vector<RuleWorld::Action> choices;
  const auto add = [&](RuleWorld::Action action, std::size_t weight) {
    choices.insert(choices.end(), weight, action);
  };
  add(RuleWorld::kRun, 20 + random() % 40);
  add(RuleWorld::kDeliver, 5 + random() % 30);
  if (random() % 4 != 0) {
    add(RuleWorld::kCrash, 1 + random() % 3);
    add(RuleWorld::kRestart, 1 + random() % 4);
  }
  if (random() % 2 == 0) add(RuleWorld::kLate, 1 + random() % 2);
  if (random() % 2 == 0) add(RuleWorld::kLose, 1);
  if (random() % 2 == 0) add(RuleWorld::kRepeat, 1);
  if (random() % 2 == 0) add(RuleWorld::kUserFailure, 1);
  if (random() % 2 == 0) add(RuleWorld::kLocalAbort, 1);
  return choices;
}

TEST(CommitRule, KeepsAllRanksEqualUnderEverySchedule) {
  const auto schedules = torchspan::testing::number_from("TORCHSPAN_CASES", std::uint64_t{4'000});
  std::array<std::uint64_t, RuleWorld::kActions> done{};
  std::uint64_t generations = 0, lost = 0;
  for (std::uint64_t seed = 1; seed <= schedules; ++seed) {
    std::mt19937_64 random(seed * 0x9e3779b97f4a7c15u);
    const int ranks = 1 + static_cast<int>(random() % 5);
    RuleWorld world(ranks, seed, 1 + static_cast<std::int64_t>(random() % 8));
    const auto choices = choices_of(random);
    const std::size_t length = random() % 400;
    for (std::size_t i = 0; i < length && world.failure().empty() && !world.lost(); ++i) {
      const RuleWorld::Action action = choices[random() % choices.size()];
      if (world.act(action)) ++done[action];
    }
    world.settle();
    ASSERT_EQ(world.failure(), "") << "seed " << seed << ", " << ranks << " ranks, TORCHSPAN_CASES=" << seed;
    generations += world.generations();
    lost += world.lost() ? 1 : 0;
  }
  for (std::size_t action = 0; action < done.size(); ++action)
    EXPECT_GT(done[action], schedules / 100) << "action " << action << " was hardly ever possible";
  EXPECT_LT(lost, schedules / 10);
  fmt::print("{} schedules, {} generations, {} crashes, {} times no state was left\n", schedules, generations,
             done[RuleWorld::kCrash], lost);
}

}  // namespace
}  // namespace torchspan::quorum::testing::rule_search_test
