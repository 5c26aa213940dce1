#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <tuple>
#include <vector>

#include <torchspan/core/error.h>

#include "schedule/test_tables.h"
#include "tests/support/environment.h"

namespace torchspan::schedule::simulate_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::number_from;

/// The values of a simulated step that the papers' tables list, in units; all ranks must have the same idle
/// time.
struct Outcome {
  double makespan = 0, idle = 0, peak = 0;
  friend bool operator==(const Outcome&, const Outcome&) = default;
  friend void PrintTo(const Outcome& outcome, std::ostream* out) {
    *out << "makespan " << outcome.makespan << ", idle " << outcome.idle << ", peak " << outcome.peak;
  }
};

Outcome outcome(const Table& table, int chunks = 1) {
  const Timeline timeline = simulate(table, unit_costs(chunks));
  for (const Duration idle : timeline.idle) EXPECT_EQ(idle, timeline.idle.front());
  return {in_units(timeline.makespan), in_units(timeline.idle.front()),
          *std::max_element(timeline.peak_live.begin(), timeline.peak_live.end())};
}

TEST(Simulate, ReproducesThePapersFiguresForFourRanksAndEightMicroBatches) {
  const Shape shape{.ranks = 4, .micro_batches = 8};
  const Shape two{.ranks = 4, .micro_batches = 8, .stages_per_rank = 2};
  const Shape four{.ranks = 4, .micro_batches = 8, .stages_per_rank = 4};
  EXPECT_EQ(outcome(gpipe(looped(shape))), (Outcome{33, 9, 8}));
  EXPECT_EQ(outcome(one_forward_one_backward(shape)), (Outcome{33, 9, 4}));
  EXPECT_EQ(outcome(interleaved(two), 2), (Outcome{28.5, 4.5, 5.5}));
  EXPECT_EQ(outcome(interleaved(four), 4), (Outcome{26.25, 2.25, 4.75}));
  EXPECT_EQ(outcome(looped_breadth_first(two), 2), (Outcome{28.5, 4.5, 8}));
}

TEST(Simulate, ReproducesThePapersFiguresForEightRanksAndSixteenMicroBatches) {
  const auto makespan_and_idle = [](const Table& table, int chunks) {
    const Outcome all = outcome(table, chunks);
    return std::pair(all.makespan, all.idle);
  };
  const Shape shape{.ranks = 8, .micro_batches = 16};
  EXPECT_EQ(makespan_and_idle(one_forward_one_backward(shape), 1), std::pair(69.0, 21.0));
  EXPECT_EQ(makespan_and_idle(gpipe(looped(shape)), 1), std::pair(69.0, 21.0));
  EXPECT_EQ(makespan_and_idle(interleaved({.ranks = 8, .micro_batches = 16, .stages_per_rank = 2}), 2),
            std::pair(58.5, 10.5));
  EXPECT_EQ(makespan_and_idle(interleaved({.ranks = 8, .micro_batches = 16, .stages_per_rank = 4}), 4),
            std::pair(53.25, 5.25));
}

TEST(Simulate, HasRoomForBackwardsInTwoHalves) {
  EXPECT_EQ(outcome(zero_bubble_h1({.ranks = 4, .micro_batches = 8})), (Outcome{27, 3, 4}));
  EXPECT_EQ(outcome(zero_bubble_h1({.ranks = 8, .micro_batches = 16})), (Outcome{55, 7, 8}));
}

/// What a schedule's formula predicts for a shape: the idle time of every rank, and each rank's most
/// activations.
struct Formula {
  Duration idle{0};
  std::vector<double> peak;
};

void expect_formula(const Table& table, const std::vector<Costs>& costs, const Formula& formula) {
  const Timeline timeline = simulate(table, costs);
  const Costs& cost = costs.front();
  for (std::size_t rank = 0; rank < formula.peak.size(); ++rank) {
    const Duration busy = (cost.forward + cost.input_gradient + cost.weight_gradient) *
                          (static_cast<int>(timeline.spans[rank].size()) / 2);
    ASSERT_EQ(timeline.makespan, busy + formula.idle) << table.name;
    ASSERT_EQ(timeline.idle[rank], formula.idle) << table.name << " rank " << rank;
    ASSERT_NEAR(timeline.peak_live[rank], formula.peak[rank], 1e-9) << table.name << " rank " << rank;
    ASSERT_NEAR(timeline.live[rank].back(), 0, 1e-9);
  }
}

/// Idle time of a pipeline in which each rank runs all micro-batches `v` times: it waits for the first
/// micro-batch and, with fewer micro-batches than ranks, for each round to return.
Duration idle_of_rounds(int p, int m, int v, Duration both) {
  return m >= p ? (p - 1) * both : (p * v + m - 1 - m * v) * both;
}

TEST(Simulate, AgreesWithEveryFormulaForEveryShapeAndCost) {
  const std::vector<std::tuple<int, int, int>> costs{{1, 1, 1}, {2, 1, 1}, {1, 3, 1}, {3, 1, 0}};
  // Each shape with two of the costs, or with more if TORCHSPAN_CASES says so: all four take seconds.
  const std::size_t turns = std::min(costs.size(), number_from("TORCHSPAN_CASES", std::size_t{2}));
  for (std::size_t turn = 0; turn < turns; ++turn) {
    for (int p = 1; p <= 8; ++p) {
      for (int m = 1; m <= 32; ++m) {
        const auto [forward, input, weight] = costs[(turn + static_cast<std::size_t>(p + m)) % costs.size()];
        SCOPED_TRACE(::testing::Message() << p << " ranks, " << m << " micro-batches, costs " << forward
                                          << ", " << input << " and " << weight);
        const auto whole = unit_costs(1, forward, input, weight);
        const Duration both = (forward + input + weight) * Duration{kUnit};
        const Shape shape{.ranks = p, .micro_batches = m};
        const auto ranks = static_cast<std::size_t>(p);
        const std::vector<double> all(ranks, m);
        expect_formula(gpipe(looped(shape)), whole, {(p - 1) * both, all});
        std::vector<double> follow(ranks);
        for (int r = 0; r < p; ++r) follow[static_cast<std::size_t>(r)] = std::min(m, p - r);
        expect_formula(one_forward_one_backward(shape), whole, {(p - 1) * both, follow});
        for (int v = 2; v <= 4; ++v) {
          const Shape chunked{.ranks = p, .micro_batches = m, .stages_per_rank = v};
          const auto part = unit_costs(v, forward, input, weight);
          const Duration idle = idle_of_rounds(p, m, v, both / v);
          expect_formula(looped_breadth_first(chunked), part, {idle, all});
          if (m > p && m % p != 0) continue;
          std::vector<double> ahead(ranks);
          for (int r = 0; r < p; ++r) {
            // For v chunks each: (v - 1) groups, two chunks per hop, and the one at the turning point.
            const double chunks = (v - 1) * std::min(m, p) + 2 * (p - 1 - r) + 1;
            ahead[static_cast<std::size_t>(r)] = std::min<double>(m, chunks / v);
          }
          expect_formula(interleaved(chunked), part, {idle, ahead});
        }
      }
    }
  }
}

TEST(Simulate, ForwardsOnlyHoldNothingAndFillLikeAPipeline) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 32; ++m) {
      const Timeline timeline =
          simulate(forward_only(looped({.ranks = p, .micro_batches = m})), unit_costs());
      EXPECT_EQ(in_units(timeline.makespan), m + p - 1);
      EXPECT_THAT(timeline.peak_live, ::testing::Each(0));
    }
  }
}

TEST(Simulate, ARepeatedForwardNeedsItsMemoryDuringItsBackwardOnly) {
  const std::vector<Costs> costs = {{.activation = 1, .recomputation = 5}};
  const Table gpipe_table = gpipe(looped({.ranks = 2, .micro_batches = 4}));
  const Timeline whole = simulate(gpipe_table, costs);
  // The four inputs, and in the first backward one graph.
  EXPECT_THAT(whole.peak_live, ::testing::Each(9));
  for (const auto& live : whole.live) EXPECT_EQ(*std::max_element(live.begin(), live.end()), 4);
  const Timeline last = simulate(gpipe(looped({.ranks = 1, .micro_batches = 1})), costs);
  EXPECT_THAT(last.peak_live, ::testing::Each(6));
  // After the input gradient a part of the graph stays for the weight gradient.
  const Timeline split = simulate(zero_bubble_h1({.ranks = 1, .micro_batches = 1}),
                                  {{.activation = 1, .weight_input = 2, .recomputation = 5}});
  EXPECT_EQ(split.peak_live, std::vector<double>{6});
  EXPECT_EQ(split.live, (std::vector<std::vector<double>>{{1, 2, 0}}));
  // A stage that runs its whole backward as weight gradient repeats its forward there.
  const Timeline late =
      simulate(zero_bubble_h1({.ranks = 1, .micro_batches = 1}),
               {{.input_gradient = Duration{0}, .activation = 1, .weight_input = 2, .recomputation = 5}});
  EXPECT_EQ(late.peak_live, std::vector<double>{7});
  EXPECT_THROW(simulate(gpipe_table, {{.recomputation = -1}}), Error);
}

TEST(Simulate, CostsAreTheStagesAndATransferIsPaidBetweenRanksOnly) {
  // Stages 0 and 1 on rank 0, stage 2 on rank 1.
  const Table table = gpipe({.rank_of_stage = {0, 0, 1}, .micro_batches = 1});
  const auto costs = [](int forward, int input, int weight, int transfer, double activation) {
    return Costs{Duration{forward}, Duration{input}, Duration{weight}, Duration{transfer}, activation};
  };
  const Timeline timeline =
      simulate(table, {costs(1, 10, 20, 1000, 0.5), costs(2, 30, 40, 100, 1.5), costs(4, 50, 60, 200, 8)});
  ASSERT_EQ(timeline.spans[0].size(), 4u);
  ASSERT_EQ(timeline.spans[1].size(), 2u);
  const auto expect_span = [](const ActionSpan& span, const char* action, int start, int end) {
    EXPECT_EQ(to_string(span.action), action);
    EXPECT_EQ(span.start, Duration{start}) << action;
    EXPECT_EQ(span.end, Duration{end}) << action;
  };
  expect_span(timeline.spans[0][0], "0F0", 0, 1);
  expect_span(timeline.spans[0][1], "1F0", 1, 3);
  expect_span(timeline.spans[1][0], "2F0", 103, 107);
  expect_span(timeline.spans[1][1], "2B0", 107, 217);
  expect_span(timeline.spans[0][2], "1B0", 417, 487);
  expect_span(timeline.spans[0][3], "0B0", 487, 517);
  EXPECT_EQ(timeline.makespan, Duration{517});
  EXPECT_EQ(timeline.idle, (std::vector<Duration>{Duration{517 - 103}, Duration{517 - 114}}));
  EXPECT_EQ(timeline.peak_live, (std::vector<double>{2, 8}));
  EXPECT_EQ(timeline.live[0], (std::vector<double>{0.5, 2, 0.5, 0}));
  EXPECT_EQ(timeline.live[1], (std::vector<double>{8, 0}));
}

TEST(Simulate, AnActivationIsKeptUntilItsWeightGradient) {
  const Table table{.name = "halves",
                    .rank_of_stage = {0},
                    .micro_batches = 2,
                    .actions = {actions_of("0F0 0I0 0F1 0I1 0W0 0W1")}};
  EXPECT_EQ(simulate(table, {Costs{}}).live[0], (std::vector<double>{1, 1, 2, 2, 1, 0}));
}

TEST(Simulate, WeightInputsAreKeptFromTheInputGradientToTheWeightGradient) {
  const Table table{.name = "halves",
                    .rank_of_stage = {0},
                    .micro_batches = 3,
                    .actions = {actions_of("0F0 0I0 0F1 0I1 0F2 0W0 0B2 0W1")}};
  const Timeline timeline = simulate(table, {Costs{.activation = 4, .weight_input = 1}});
  EXPECT_EQ(timeline.live[0], (std::vector<double>{4, 1, 5, 2, 6, 5, 1, 0}));
  EXPECT_EQ(timeline.weight_inputs[0], (std::vector<double>{0, 1, 1, 2, 2, 1, 1, 0}));
  EXPECT_EQ(timeline.peak_live[0], 6);
  EXPECT_EQ(timeline.peak_weight_inputs[0], 2);
}

TEST(Simulate, ThePeriodOfAStepIsItsLongestSpan) {
  // Rank 0 runs from 0 to 6 and rank 1 from 1 to 4.
  const Timeline timeline = simulate(gpipe(looped({.ranks = 2, .micro_batches = 1})), {Costs{}});
  EXPECT_EQ(step_period(timeline), Duration{6});
  EXPECT_DOUBLE_EQ(bubble_share(timeline), 0.5);
  EXPECT_DOUBLE_EQ(idle_share(timeline), 0.5);
  const Timeline forwards = simulate(forward_only(looped({.ranks = 3, .micro_batches = 6})), {Costs{}});
  EXPECT_EQ(step_period(forwards), Duration{6});
  EXPECT_EQ(bubble_share(forwards), 0);
  EXPECT_DOUBLE_EQ(idle_share(forwards), 0.25);
  EXPECT_EQ(bubble_share(Timeline{}), 0);
  EXPECT_EQ(idle_share(Timeline{}), 0);
}

TEST(Simulate, MicroBatchesWithoutBackwardAreNotKept) {
  const Table table{
      .name = "mixed", .rank_of_stage = {0}, .micro_batches = 2, .actions = {actions_of("0F0 0F1 0B1")}};
  EXPECT_EQ(simulate(table, {Costs{}}).live[0], (std::vector<double>{0, 1, 0}));
}

TEST(Simulate, ARankWithoutStagesIsIdleAllTheTime) {
  const Timeline timeline = simulate(gpipe({.rank_of_stage = {2}, .micro_batches = 1}), {Costs{}});
  EXPECT_EQ(timeline.idle, (std::vector<Duration>{Duration{3}, Duration{3}, Duration{0}}));
  EXPECT_TRUE(timeline.spans[0].empty());
}

TEST(MeanCosts, OfASimulatedStepAreItsCosts) {
  using std::chrono::milliseconds;
  const std::vector<Costs> costs{
      {.forward = milliseconds(2), .input_gradient = milliseconds(3), .weight_gradient = milliseconds(1)},
      {.forward = milliseconds(4), .input_gradient = milliseconds(2), .weight_gradient = milliseconds(5)},
      {.forward = milliseconds(1), .input_gradient = milliseconds(6), .weight_gradient = milliseconds(2)},
      {.forward = milliseconds(3), .input_gradient = milliseconds(1), .weight_gradient = milliseconds(4)}};
  // DualPipeV splits some backwards of each stage and not the others.
  for (const Table& table : {zero_bubble_v({.ranks = 2, .micro_batches = 6, .stages_per_rank = 2}),
                             dual_pipe_v({.ranks = 2, .micro_batches = 6, .stages_per_rank = 2})}) {
    const auto measured = mean_costs(simulate(table, costs), 4);
    for (std::size_t stage = 0; stage < costs.size(); ++stage) {
      EXPECT_EQ(measured[stage].forward, costs[stage].forward) << table.name;
      EXPECT_EQ(measured[stage].input_gradient, costs[stage].input_gradient) << table.name << stage;
      EXPECT_EQ(measured[stage].weight_gradient, costs[stage].weight_gradient) << table.name << stage;
    }
  }
  // Without a split, a backward counts as the input gradient.
  const auto whole =
      mean_costs(simulate(one_forward_one_backward(Shape{.ranks = 4, .micro_batches = 4}), costs), 4);
  EXPECT_EQ(whole[1].input_gradient, milliseconds(7));
  EXPECT_EQ(whole[1].weight_gradient, milliseconds(0));
}

TEST(Simulate, RefusesCostsThatDoNotFit) {
  const Table table = gpipe({.rank_of_stage = {0, 1, 1}, .micro_batches = 1});
  const auto error_text = [&](const std::vector<Costs>& costs) {
    try {
      simulate(table, costs);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("accepted");
  };
  EXPECT_THAT(error_text({}), HasSubstr("costs has 0 entries"));
  EXPECT_THAT(error_text(std::vector<Costs>(2)),
              HasSubstr("costs has 2 entries; expected one for all stages, or "
                        "one for each of the 3"));
  EXPECT_THAT(error_text({Costs{}, Costs{}, Costs{.transfer = Duration{-1}}}),
              HasSubstr("costs[2] has a negative"));
  EXPECT_THAT(error_text({Costs{.activation = -1}}), HasSubstr("costs[0] has a negative"));
  EXPECT_THAT(error_text({Costs{.weight_input = -1}}), HasSubstr("costs[0] has a negative"));
}

/// Computes the start of each action as the smallest that satisfies every order, repeating until nothing
/// changes.
std::map<Action, Duration> relaxed(const Table& table, const std::vector<Costs>& costs) {
  const auto cost = [&](const Action& action) {
    const Costs& of = costs[static_cast<std::size_t>(action.stage)];
    if (action.kind == ActionKind::kForward) return of.forward;
    if (action.kind == ActionKind::kInputGradient) return of.input_gradient;
    if (action.kind == ActionKind::kWeightGradient) return of.weight_gradient;
    return of.input_gradient + of.weight_gradient;
  };
  std::map<Action, Duration> starts;
  for (const auto& actions : table.actions) {
    for (const Action& action : actions) starts[action] = Duration{0};
  }
  for (bool changed = true; changed;) {
    changed = false;
    const auto after = [&](const Action& action, const Action& before, Duration hop) {
      const auto known = starts.find(before);
      if (known == starts.end() || starts[action] >= known->second + cost(before) + hop) return;
      starts[action] = known->second + cost(before) + hop;
      changed = true;
    };
    for (const auto& actions : table.actions) {
      for (std::size_t at = 0; at < actions.size(); ++at) {
        const Action& action = actions[at];
        const int upstream = action.kind == ActionKind::kForward ? action.stage - 1 : action.stage + 1;
        if (at > 0) after(action, actions[at - 1], Duration{0});
        if (action.kind == ActionKind::kWeightGradient || upstream < 0 || upstream == table.stages())
          continue;
        const auto other = static_cast<std::size_t>(upstream);
        const bool hops =
            table.rank_of_stage[other] != table.rank_of_stage[static_cast<std::size_t>(action.stage)];
        const Duration hop = hops ? costs[other].transfer : Duration{0};
        for (const auto kind : {ActionKind::kForward, ActionKind::kBackward, ActionKind::kInputGradient}) {
          if ((kind == ActionKind::kForward) == (action.kind == ActionKind::kForward)) {
            after(action, {kind, upstream, action.micro_batch}, hop);
          }
        }
      }
    }
  }
  return starts;
}

class SimulateSeed : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, SimulateSeed,
                         ::testing::Range<std::uint64_t>(1, 1 + number_from("TORCHSPAN_CASES",
                                                                            std::uint64_t{25})));

TEST_P(SimulateSeed, AgreesWithRelaxationForAnyPlacementAndCosts) {
  std::mt19937_64 random(GetParam());
  const auto up_to = [&](unsigned most) { return static_cast<int>(random() % most); };
  const Placement placement = random_placement(random);
  SCOPED_TRACE(describe(placement));
  const Shape shape{.ranks = 1 + up_to(5), .micro_batches = 1 + up_to(9)};
  for (const Table& table : {gpipe(placement), one_forward_one_backward(placement), zero_bubble_h1(shape)}) {
    std::vector<Costs> costs;
    for (int stage = 0; stage < table.stages(); ++stage) {
      costs.push_back({.forward = Duration{up_to(9)},
                       .input_gradient = Duration{up_to(9)},
                       .weight_gradient = Duration{up_to(9)},
                       .transfer = Duration{up_to(4)},
                       .activation = up_to(5) / 4.0});
    }
    const auto starts = relaxed(table, costs);
    const Timeline timeline = simulate(table, costs);
    for (std::size_t rank = 0; rank < timeline.spans.size(); ++rank) {
      const auto& spans = timeline.spans[rank];
      Duration busy{0};
      ASSERT_EQ(spans.size(), table.actions[rank].size());
      for (std::size_t at = 0; at < spans.size(); ++at) {
        EXPECT_EQ(spans[at].action, table.actions[rank][at]);
        ASSERT_EQ(spans[at].start, starts.at(spans[at].action))
            << table.name << " " << to_string(spans[at].action);
        EXPECT_LE(spans[at].end, timeline.makespan);
        busy += spans[at].end - spans[at].start;
      }
      EXPECT_EQ(timeline.idle[rank], timeline.makespan - busy);
    }
  }
}

}  // namespace
}  // namespace torchspan::schedule::simulate_test
