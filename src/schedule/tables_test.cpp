#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>

#include <torchspan/core/error.h>

#include "schedule/test_tables.h"
#include "tests/support/environment.h"

namespace torchspan::schedule::tables_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::number_from;

/// The most micro-batches between their forward and their backward at one stage, by the order of its rank
/// alone.
int most_alive(const Table& table, int stage) {
  int alive = 0, most = 0;
  for (const Action& action :
       table.actions[static_cast<std::size_t>(table.rank_of_stage[static_cast<std::size_t>(stage)])]) {
    if (action.stage != stage) continue;
    alive += action.kind == ActionKind::kForward ? 1 : -1;
    most = std::max(most, alive);
  }
  return most;
}

template <class Call>
void expect_refused(Call call, const std::string& error_text) {
  try {
    call();
    ADD_FAILURE() << "accepted, but expected is: " << error_text;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.message(), HasSubstr(error_text));
  }
}

TEST(Tables, ActionsAreNamedByStageKindAndMicroBatch) {
  EXPECT_EQ(to_string({ActionKind::kForward, 2, 5}), "2F5");
  EXPECT_EQ(to_string({ActionKind::kBackward, 0, 11}), "0B11");
  EXPECT_EQ(to_string({ActionKind::kInputGradient, 1, 0}), "1I0");
  EXPECT_EQ(to_string({ActionKind::kWeightGradient, 30, 1}), "30W1");
}

TEST(Tables, LoopedPutsStagesOnRanksInTurn) {
  const Placement placement = looped({.ranks = 3, .micro_batches = 7, .stages_per_rank = 2});
  EXPECT_EQ(placement.rank_of_stage, (std::vector<int>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(placement.micro_batches, 7);
  EXPECT_EQ(placement.ranks, 3);
}

TEST(Tables, GPipeRunsAllForwardsThenAllBackwardsFromTheLastMicroBatch) {
  const Table table = gpipe(looped({.ranks = 2, .micro_batches = 3}));
  EXPECT_EQ(line_of(table.actions[0]), "0F0 0F1 0F2 0B2 0B1 0B0");
  EXPECT_EQ(line_of(table.actions[1]), "1F0 1F1 1F2 1B2 1B1 1B0");
}

TEST(Tables, ARankThatFollowsItselfSendsEachMicroBatchOnAtOnce) {
  const Table table = gpipe({.rank_of_stage = {0, 0, 1}, .micro_batches = 2});
  EXPECT_EQ(line_of(table.actions[0]), "0F0 1F0 0F1 1F1 1B1 0B1 1B0 0B0");
  EXPECT_EQ(line_of(table.actions[1]), "2F0 2F1 2B1 2B0");
  EXPECT_EQ(line_of(forward_only({.rank_of_stage = {0, 0, 1}, .micro_batches = 2}).actions[0]),
            "0F0 1F0 0F1 1F1");
}

TEST(Tables, OneForwardOneBackwardWarmsUpByTheRanksThatFollow) {
  const Table table = one_forward_one_backward(Shape{.ranks = 3, .micro_batches = 4});
  EXPECT_EQ(line_of(table.actions[0]), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  EXPECT_EQ(line_of(table.actions[1]), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
  EXPECT_EQ(line_of(table.actions[2]), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
}

TEST(Tables, InterleavedTakesItsStagesInGroupsOfMicroBatches) {
  const Table table = interleaved({.ranks = 2, .micro_batches = 4, .stages_per_rank = 2});
  EXPECT_EQ(line_of(table.actions[0]), "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3");
  EXPECT_EQ(line_of(table.actions[1]), "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
}

TEST(Tables, LoopedBreadthFirstFinishesAStageBeforeTheNext) {
  const Table table = looped_breadth_first({.ranks = 2, .micro_batches = 2, .stages_per_rank = 2});
  EXPECT_EQ(line_of(table.actions[0]), "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0");
  EXPECT_EQ(line_of(table.actions[1]), "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0");
}

// peer: pipelining pipeline_order, valid_schedule, invalid_schedule_*: same
TEST(Tables, EveryScheduleOfEveryShapeIsValid) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 32; ++m) {
      ASSERT_NO_THROW(validate(one_forward_one_backward(Shape{.ranks = p, .micro_batches = m})));
      for (int v = 1; v <= 4; ++v) {
        const Shape shape{.ranks = p, .micro_batches = m, .stages_per_rank = v};
        SCOPED_TRACE(::testing::Message()
                     << p << " ranks, " << m << " micro-batches, " << v << " stages a rank");
        for (const Table& table : {forward_only(looped(shape)), gpipe(looped(shape)),
                                   looped_breadth_first(shape), one_forward_one_backward(looped(shape))}) {
          ASSERT_NO_THROW(validate(table));
        }
        if (m < p || m % p == 0) {
          ASSERT_NO_THROW(validate(interleaved(shape)));
        } else {
          ASSERT_THROW(interleaved(shape), Error);
        }
      }
    }
  }
}

TEST(Tables, ListSchedulingFindsOneForwardOneBackwardByItself) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 32; ++m) {
      const Shape shape{.ranks = p, .micro_batches = m};
      const Table table = one_forward_one_backward(shape);
      const Table found = one_forward_one_backward(looped(shape));
      EXPECT_EQ(found.name, table.name);
      ASSERT_EQ(found.actions, table.actions) << p << " ranks, " << m << " micro-batches";
    }
  }
}

class TablesOfSeed : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, TablesOfSeed,
                         ::testing::Range<std::uint64_t>(1, 1 + number_from("TORCHSPAN_CASES",
                                                                            std::uint64_t{100})));

TEST_P(TablesOfSeed, AnyPlacementGetsValidTablesOfAllItsActions) {
  std::mt19937_64 random(GetParam());
  const Placement placement = random_placement(random);
  SCOPED_TRACE(describe(placement));
  const int most = static_cast<int>(random() % 7);
  const std::size_t cells =
      placement.rank_of_stage.size() * static_cast<std::size_t>(placement.micro_batches);
  const std::map<std::string, Table> tables = {{"forward-only", forward_only(placement)},
                                               {"gpipe", gpipe(placement)},
                                               {"1f1b", one_forward_one_backward(placement, most)}};
  for (const auto& [name, table] : tables) {
    EXPECT_EQ(table.name, name);
    EXPECT_EQ(table.ranks(), placement.ranks);
    EXPECT_EQ(table.rank_of_stage, placement.rank_of_stage);
    ASSERT_NO_THROW(validate(table)) << name;
    std::size_t actions = 0;
    for (const auto& row : table.actions) actions += row.size();
    EXPECT_EQ(actions, name == "forward-only" ? cells : 2 * cells);
  }
  const int limit = most == 0 ? placement.ranks : most;
  const int stages = tables.at("1f1b").stages();
  for (int stage = 0; stage < stages; ++stage) {
    EXPECT_LE(most_alive(tables.at("1f1b"), stage), std::min(limit, std::max(limit, stages) - stage))
        << stage;
    EXPECT_EQ(most_alive(tables.at("gpipe"), stage), placement.micro_batches) << stage;
  }
}

TEST_P(TablesOfSeed, NoForwardGoesBeforeABackwardThatIsReady) {
  std::mt19937_64 random(GetParam());
  const Placement placement = random_placement(random);
  SCOPED_TRACE(describe(placement));
  const Table table = one_forward_one_backward(placement, static_cast<int>(random() % 7));
  const Timeline timeline = simulate(table, {Costs{}});
  std::map<Action, Duration> ends;
  for (const auto& spans : timeline.spans) {
    for (const ActionSpan& span : spans) ends[span.action] = span.end;
  }
  for (const auto& spans : timeline.spans) {
    for (auto forward = spans.begin(); forward != spans.end(); ++forward) {
      if (forward->action.kind != ActionKind::kForward) continue;
      for (auto later = forward + 1; later != spans.end(); ++later) {
        const auto [kind, stage, i] = later->action;
        if (kind == ActionKind::kForward) continue;
        const bool last = stage + 1 == table.stages();
        const Action before = last ? Action{ActionKind::kForward, stage, i} : Action{kind, stage + 1, i};
        ASSERT_GT(ends.at(before), forward->start)
            << to_string(forward->action) << " before " << to_string(later->action);
      }
    }
  }
}

TEST(Tables, InvalidShapesAreRejectedByName) {
  expect_refused([] { one_forward_one_backward(Shape{.ranks = 0}); }, "ranks is 0; at least 1");
  expect_refused([] { looped({.ranks = 2, .micro_batches = -1}); }, "micro_batches is -1; at least 1");
  expect_refused([] { looped_breadth_first({.stages_per_rank = 0}); }, "stages_per_rank is 0; at least 1");
  expect_refused(
      [] { one_forward_one_backward(Shape{.ranks = 2, .micro_batches = 2, .stages_per_rank = 2}); },
      "stages_per_rank is 2; this schedule has one stage per rank. Use interleaved()");
  expect_refused([] { interleaved({.ranks = 4, .micro_batches = 10, .stages_per_rank = 2}); },
                 "micro_batches is 10, which is not a multiple of the 4 ranks; use 8 or 12");
  expect_refused([] { gpipe({}); }, "rank_of_stage is empty");
  expect_refused([] { gpipe({.rank_of_stage = {0, -1}}); }, "rank_of_stage[1] is -1");
  expect_refused(
      [] {
        forward_only({.rank_of_stage = {0, 3}, .micro_batches = 1, .ranks = 3});
      },
      "rank_of_stage[1] is 3; there are 3 ranks");
  expect_refused([] { gpipe({.rank_of_stage = {2147483647}}); }, "rank_of_stage[0] is 2147483647");
  expect_refused(
      [] {
        one_forward_one_backward(Placement{.rank_of_stage = {0, 1}}, -1);
      },
      "max_in_flight is -1");
  expect_refused([] { looped({.ranks = 1 << 20, .micro_batches = 1 << 20, .stages_per_rank = 1 << 20}); },
                 "are more than");
}

}  // namespace
}  // namespace torchspan::schedule::tables_test
