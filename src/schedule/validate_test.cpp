#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <set>

#include <torchspan/core/error.h>

#include "schedule/test_tables.h"

namespace torchspan::schedule::validate_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The error text of validate() for a table; empty if the table is valid.
std::string error_text(const Table& table) {
  try {
    validate(table);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    return error.message();
  }
  return "";
}

Table table_of(std::vector<int> rank_of_stage, int micro_batches, const std::vector<std::string>& lines) {
  Table table{.name = "mine",
              .rank_of_stage = std::move(rank_of_stage),
              .micro_batches = micro_batches,
              .actions = {}};
  for (const auto& line : lines) table.actions.push_back(actions_of(line));
  return table;
}

// peer suite: pipelining pipeline_order
TEST(Validate, AcceptsWholeAndSplitBackwardsSideBySide) {
  EXPECT_EQ(error_text(table_of({0, 1}, 1, {"0F0 0B0", "1F0 1I0 1W0"})), "");
  EXPECT_EQ(error_text(table_of({0, 1}, 1, {"0F0 0I0 0W0", "1F0 1B0"})), "");
  EXPECT_EQ(error_text(table_of({0, 1}, 2, {"0F0 0F1 0B1", "1F0 1F1 1B1"})), "");
  EXPECT_EQ(error_text(zero_bubble_h1({.ranks = 4, .micro_batches = 8})), "");
}

TEST(Validate, NamesRankAndActionOfMissingRepeatedOrMisplacedActions) {
  struct Row {
    Table table;
    std::string error_text;
  };
  const std::vector<Row> rows = {
      {table_of({0, 1}, 2, {"0F0 0F1", "1F0"}), "rank 1 never runs 1F1"},
      {table_of({0, 1}, 1, {"0F0", "1F0 1B0"}),
       "rank 0 never runs 0B0, although micro-batch 0 has backwards"},
      {table_of({0, 1}, 1, {"0F0 0B0", "1F0 1I0"}), "rank 1 runs 1I0 but never 1W0"},
      {table_of({0, 1}, 1, {"0F0 0B0", "1F0 1W0"}), "rank 1 runs 1W0 but never 1I0"},
      {table_of({0}, 1, {"0F0 0B0 0W0"}), "rank 0 runs 0B0 and also its part 0W0"},
      {table_of({0}, 1, {"0F0 0I0 0B0 0W0"}), "rank 0 runs 0B0 and also its part 0I0"},
      {table_of({0, 1}, 1, {"0F0 0F0", "1F0"}), "rank 0 runs 0F0 twice: actions 0 and 1 of its list"},
      {table_of({0, 1}, 1, {"0F0 1F0", ""}),
       "rank 0, action 1 of its list: 1F0 belongs to rank 1, which owns stage 1"},
      {table_of({0}, 1, {"0F0 3F0"}), "rank 0, action 1 of its list: 3F0 is of stage 3; there are 1 stages"},
      {table_of({0}, 1, {"0F0 0F1"}), "rank 0, action 1 of its list: 0F1 is of micro-batch 1; there are 1"},
      {table_of({0}, 1, {"0F0 0F-1"}), "0F-1 is of micro-batch -1"},
      {table_of({0, 2}, 1, {"0F0", "1F0"}), "rank_of_stage[1] is 2; actions has 2 ranks"},
      {table_of({0}, 0, {"0F0"}), "micro_batches is 0"},
      {table_of({}, 1, {"0F0"}), "rank_of_stage is empty"},
      {table_of({0, 0, 0}, 2147483647, {"0F0"}), "are more than"},
  };
  for (const Row& row : rows) {
    EXPECT_THAT(error_text(row.table), AllOf(HasSubstr("schedule 'mine'"), HasSubstr(row.error_text)));
  }
  Table unknown = table_of({0}, 1, {"0F0"});
  unknown.actions[0][0].kind = static_cast<ActionKind>(9);
  EXPECT_THAT(error_text(unknown), HasSubstr("0?0 has an unknown kind"));
}

TEST(Validate, ShowsTheCycleOfADeadlock) {
  // Rank 0 waits for its backward before it sends what rank 1 needs to get there.
  EXPECT_EQ(
      error_text(table_of({0, 1}, 2, {"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"})),
      "schedule 'mine': ranks wait for each other in a cycle; rank 0 at 0B0 (action 1 of its list) waits "
      "for 1B0 of "
      "rank 1, which comes after 1F1; rank 1 at 1F1 (action 1 of its list) waits for 0F1 of rank 0, "
      "which comes "
      "after 0B0");
}

TEST(Validate, OmitsRanksThatOnlyWaitForTheCycle) {
  const std::string text =
      error_text(table_of({0, 1, 2}, 2, {"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B1 2B0"}));
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("rank 1 at 1B0 (action 1 of its list) waits for 2B0 of rank 2, which comes after 2F1"),
          HasSubstr("rank 2 at 2F1 (action 1 of its list) waits for 1F1 of rank 1, which comes after 1B0")));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("rank 0 at")));
}

TEST(Validate, ReportsARankThatWaitsForItself) {
  EXPECT_EQ(error_text(table_of({0}, 1, {"0B0 0F0"})),
            "schedule 'mine': a rank waits for itself; rank 0 at 0B0 (action 0 of its list) waits for 0F0 of "
            "the same rank, which "
            "comes after 0B0");
  EXPECT_THAT(error_text(table_of({0}, 1, {"0F0 0W0 0I0"})),
              HasSubstr("rank 0 at 0W0 (action 1 of its list) waits for 0I0"));
}

/// Whether the actions can run to the end, by trying every rank repeatedly.
bool can_finish(const Table& table) {
  std::set<Action> done;
  std::vector<std::size_t> next(table.actions.size(), 0);
  const auto is_done = [&](ActionKind kind, int stage, int i) { return done.contains({kind, stage, i}); };
  const auto is_ready = [&](const Action& action) {
    const auto [kind, stage, i] = action;
    if (kind == ActionKind::kForward) return stage == 0 || is_done(kind, stage - 1, i);
    if (kind == ActionKind::kWeightGradient) return is_done(ActionKind::kInputGradient, stage, i);
    if (!is_done(ActionKind::kForward, stage, i)) return false;
    return stage + 1 == table.stages() || is_done(ActionKind::kBackward, stage + 1, i) ||
           is_done(ActionKind::kInputGradient, stage + 1, i);
  };
  std::size_t left = 0;
  for (const auto& actions : table.actions) left += actions.size();
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < next.size(); ++rank) {
      if (next[rank] == table.actions[rank].size() || !is_ready(table.actions[rank][next[rank]])) continue;
      done.insert(table.actions[rank][next[rank]++]);
      --left;
      moved = true;
    }
  }
  return left == 0;
}

TEST(Validate, FindsExactlyTheOrdersThatCannotFinish) {
  int good = 0, bad = 0;
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    std::mt19937_64 random(seed);
    const Placement placement = random_placement(random);
    Table table = seed % 2 == 0 ? gpipe(placement) : zero_bubble_h1({.ranks = 3, .micro_batches = 4});
    for (int swaps = 1 + static_cast<int>(random() % 2); swaps > 0; --swaps) {
      auto& actions = table.actions[random() % table.actions.size()];
      if (actions.empty()) continue;
      std::swap(actions[random() % actions.size()], actions[random() % actions.size()]);
    }
    const bool fine = can_finish(table);
    ++(fine ? good : bad);
    ASSERT_EQ(error_text(table).empty(), fine) << "seed " << seed << ": " << error_text(table);
  }
  EXPECT_GT(good, 200);
  EXPECT_GT(bad, 200);
}

}  // namespace
}  // namespace torchspan::schedule::validate_test
