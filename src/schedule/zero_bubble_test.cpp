#include <algorithm>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tuple>
#include <vector>

#include <torchspan/core/error.h>

#include "schedule/test_tables.h"
#include "tests/support/environment.h"

namespace torchspan::schedule::zero_bubble_test {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using torchspan::testing::number_from;

double most(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

/// Time of the last micro-batch's end beyond a rank's own work of `m` micro-batches, in units.
double beyond_work(Duration time, int m, int all) { return in_units(time) - m * all; }

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    return error.message();
  }
  return "accepted";
}

TEST(ZeroBubble, TellsThatSmallLimitsHaveNoRoomToo) {
  const Placement placement{.rank_of_stage = {0}, .micro_batches = 2};
  EXPECT_THAT(error_of([&] { zero_bubble(placement, {Costs{.activation = 1e-9}}, 5e-10); }),
              HasSubstr("one micro-batch needs 1e-09 on rank 0"));
}

TEST(ZeroBubble, H1PostponesAsManyWeightGradientsAsRanksPrecede) {
  const Table table = zero_bubble_h1({.ranks = 3, .micro_batches = 4});
  EXPECT_EQ(line_of(table.actions[0]), "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3");
  EXPECT_EQ(line_of(table.actions[1]), "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3");
  EXPECT_EQ(line_of(table.actions[2]), "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3");
}

TEST(ZeroBubble, H2RunsTwiceAsManyForwardsAheadAndWeightGradientsLate) {
  const Table table = zero_bubble_h2({.ranks = 2, .micro_batches = 4});
  EXPECT_EQ(line_of(table.actions[0]), "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3");
  EXPECT_EQ(line_of(table.actions[1]), "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3");
}

TEST(ZeroBubble, InterleavedWithOneStagePerRankIsH1) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = p; m <= 4 * p; m += p) {
      const Shape shape{.ranks = p, .micro_batches = m};
      ASSERT_EQ(interleaved_zero_bubble(shape).actions, zero_bubble_h1(shape).actions) << p << ", " << m;
    }
  }
}

TEST(ZeroBubble, InterleavedTakesWeightGradientsInTheOrderOfInputGradients) {
  const Table table = interleaved_zero_bubble({.ranks = 2, .micro_batches = 2, .stages_per_rank = 2});
  EXPECT_EQ(line_of(table.actions[0]), "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1");
  EXPECT_EQ(line_of(table.actions[1]), "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1");
}

TEST(ZeroBubble, TheVGoesToTheLastRankAndBack) {
  EXPECT_EQ(v_shaped({.ranks = 3, .micro_batches = 1, .stages_per_rank = 2}).rank_of_stage,
            (std::vector<int>{0, 1, 2, 2, 1, 0}));
  const Table table = zero_bubble_v({.ranks = 2, .micro_batches = 3, .stages_per_rank = 2});
  EXPECT_EQ(line_of(table.actions[0]),
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2");
  EXPECT_EQ(line_of(table.actions[1]),
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2");
}

TEST(ZeroBubble, DualPipeVPairsForwardsWithBackwardsOfTheOtherHalf) {
  const Table table = dual_pipe_v({.ranks = 1, .micro_batches = 3, .stages_per_rank = 2});
  EXPECT_EQ(line_of(table.actions[0]), "0F0 1F0 0F1 1B0 1F1 0B0 0F2 1B1 1F2 0B1 1B2 0I2 0W2");
  const Table two = dual_pipe_v({.ranks = 2, .micro_batches = 4, .stages_per_rank = 2});
  EXPECT_EQ(line_of(two.actions[0]),
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3");
  EXPECT_EQ(line_of(two.actions[1]),
            "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3");
}

// peer: pipelining pipeline_order_flex_and_zero_bubble, pipeline_order_for_v_schedules: same; the orders are
//   equal (`tools/compare-schedules`)
TEST(ZeroBubble, EveryScheduleOfEveryShapeIsValid) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 32; ++m) {
      SCOPED_TRACE(::testing::Message() << p << " ranks, " << m << " micro-batches");
      ASSERT_NO_THROW(validate(zero_bubble_h1({.ranks = p, .micro_batches = m})));
      ASSERT_NO_THROW(validate(zero_bubble_h2({.ranks = p, .micro_batches = m})));
      const Shape two{.ranks = p, .micro_batches = m, .stages_per_rank = 2};
      ASSERT_NO_THROW(validate(zero_bubble_v(two)));
      if (m < 2 * p) {
        ASSERT_THROW(dual_pipe_v(two), Error);
      } else {
        ASSERT_NO_THROW(validate(dual_pipe_v(two)));
      }
      for (int v = 1; v <= 4; ++v) {
        const Shape shape{.ranks = p, .micro_batches = m, .stages_per_rank = v};
        if (m % std::max(1, m / p) == 0) {
          ASSERT_NO_THROW(validate(interleaved_zero_bubble(shape)));
        } else {
          ASSERT_THROW(interleaved_zero_bubble(shape), Error);
        }
      }
    }
  }
}

// peer: other_pipelines ZB test_pass (1f1b, vpp, zb, zbv): same
TEST(ZeroBubble, AgreesWithThePapersFormulasForEveryShapeAndCost) {
  const std::vector<std::tuple<int, int, int>> costs{{1, 1, 1}, {2, 2, 1}, {1, 2, 1},
                                                     {2, 3, 2}, {1, 1, 2}, {3, 3, 1}};
  // Each shape with two of the costs, or with more if TORCHSPAN_CASES says so: all six take seconds.
  const std::size_t turns = std::min(costs.size(), number_from("TORCHSPAN_CASES", std::size_t{2}));
  for (std::size_t turn = 0; turn < turns; ++turn) {
    for (int p = 1; p <= 8; ++p) {
      for (int m = p; m <= 32; ++m) {
        const auto [f, i, w] = costs[(turn + static_cast<std::size_t>(p + m)) % costs.size()];
        const auto whole = unit_costs(1, f, i, w), half = unit_costs(2, f, i, w);
        SCOPED_TRACE(::testing::Message() << p << " ranks, " << m << " micro-batches, " << f << i << w);
        const Shape one{.ranks = p, .micro_batches = m};
        const Shape two{.ranks = p, .micro_batches = m, .stages_per_rank = 2};
        // The papers assume W <= I. A longer W cannot make up for more than I, and F remains.
        const double h1 = (p - 1) * (f + std::max(0, i - w));
        ASSERT_EQ(beyond_work(simulate(zero_bubble_h1(one), whole).makespan, m, f + i + w), h1);
        if (m % p == 0) {
          ASSERT_EQ(beyond_work(simulate(interleaved_zero_bubble(two), half).makespan, m, f + i + w), h1 / 2);
        }
        if (m < 2 * p - 1) continue;
        ASSERT_EQ(beyond_work(step_period(simulate(zero_bubble_h2(one), whole)), m, f + i + w),
                  (p - 1) * std::max(0, f + i - 2 * w));
        if (m < 2 * p) continue;
        // DeepSeek's formula (P / 2 - 1)(F&B + B - 3W) for P = 2p chunks whose F and B do not overlap.
        ASSERT_LE(beyond_work(simulate(dual_pipe_v(two), half).makespan, m, f + i + w),
                  (p - 1) * std::max(f, f + 2 * (i + w) - 3 * w) / 2.0);
      }
    }
  }
}

TEST(ZeroBubble, WithEqualCostsNoRankWaitsBetweenItsFirstAndItsLastAction) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 2 * p - 1; m <= 32; ++m) {
      SCOPED_TRACE(::testing::Message() << p << " ranks, " << m << " micro-batches");
      const Timeline line = simulate(zero_bubble_h2({.ranks = p, .micro_batches = m}), unit_costs(1));
      const Timeline v =
          simulate(zero_bubble_v({.ranks = p, .micro_batches = m, .stages_per_rank = 2}), unit_costs(2));
      if (m >= 2 * p) {
        const Shape two{.ranks = p, .micro_batches = m, .stages_per_rank = 2};
        ASSERT_EQ(beyond_work(simulate(dual_pipe_v(two), unit_costs(2)).makespan, m, 3), (p - 1) / 2.0);
      }
      ASSERT_EQ(bubble_share(line), 0);
      ASSERT_EQ(bubble_share(v), 0);
      ASSERT_THAT(line.peak_live, Each(2 * p - 1));
      ASSERT_THAT(v.peak_live, Each(::testing::DoubleNear(p, 1e-9)));
    }
  }
}

TEST(ZeroBubble, MemoryIsThePapersForEveryShape) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 2 * p; m <= 32; m += p) {
      SCOPED_TRACE(::testing::Message() << p << " ranks, " << m << " micro-batches");
      const Shape one{.ranks = p, .micro_batches = m};
      const Shape two{.ranks = p, .micro_batches = m, .stages_per_rank = 2};
      const Timeline h1 = simulate(zero_bubble_h1(one), unit_costs(1));
      ASSERT_THAT(h1.peak_live, Each(p));
      const Timeline h2 = simulate(zero_bubble_h2(one), unit_costs(1));
      for (int r = 0; r < p; ++r) {
        ASSERT_EQ(h1.peak_weight_inputs[static_cast<std::size_t>(r)], r + 1);
        ASSERT_EQ(h2.peak_weight_inputs[static_cast<std::size_t>(r)], 2 * r + 1);
      }
      ASSERT_NEAR(most(simulate(interleaved_zero_bubble(two), unit_costs(2)).peak_live), p, 1e-9);
      ASSERT_NEAR(most(simulate(dual_pipe_v(two), unit_costs(2)).peak_live), p + 0.5, 1e-9);
    }
  }
}

/// The last rank of a pipeline of `parts` stages per rank starts after (p - 1) / parts forwards and then has its
/// own work, so no order is shorter than this.
double least_makespan(int p, int m, int parts) { return 3 * m + (p - 1.0) / parts; }

TEST(ZeroBubble, TheIdleShareIsTheLeastPossibleAndBelowThreePercentFrom33And17MicroBatches) {
  for (int m = 7; m <= 40; ++m) {
    SCOPED_TRACE(m);
    const Timeline line = simulate(zero_bubble_h2({.ranks = 4, .micro_batches = m}), unit_costs(1));
    const Timeline v =
        simulate(zero_bubble_v({.ranks = 4, .micro_batches = m, .stages_per_rank = 2}), unit_costs(2));
    EXPECT_EQ(in_units(line.makespan), least_makespan(4, m, 1));
    EXPECT_EQ(in_units(v.makespan), least_makespan(4, m, 2));
    EXPECT_EQ(idle_share(line) < 0.03, m >= 33);
    EXPECT_EQ(idle_share(v) < 0.03, m >= 17);
  }
  const Timeline line = simulate(zero_bubble_h2({.ranks = 4, .micro_batches = 8}), unit_costs(1));
  const Timeline v =
      simulate(zero_bubble_v({.ranks = 4, .micro_batches = 8, .stages_per_rank = 2}), unit_costs(2));
  EXPECT_DOUBLE_EQ(idle_share(line), 3 / 27.0);
  EXPECT_DOUBLE_EQ(idle_share(v), 1.5 / 25.5);
}

/// The steps of a table one after another: micro-batches of step k are numbered on from those of step k - 1.
Table repeated(const Table& table, int steps) {
  Table all = table;
  all.micro_batches *= steps;
  for (auto& actions : all.actions) {
    const auto once = actions;
    for (int step = 1; step < steps; ++step) {
      for (Action action : once) {
        action.micro_batch += step * table.micro_batches;
        actions.push_back(action);
      }
    }
  }
  return all;
}

TEST(ZeroBubble, RepeatedStepsTakeTheirPeriodEach) {
  for (int p = 1; p <= 6; ++p) {
    for (int m = 2 * p; m <= 12; m += p) {
      const Shape one{.ranks = p, .micro_batches = m};
      const Shape two{.ranks = p, .micro_batches = m, .stages_per_rank = 2};
      for (const auto& [table, chunks] :
           {std::pair(zero_bubble_h1(one), 1), std::pair(zero_bubble_h2(one), 1),
            std::pair(zero_bubble_v(two), 2), std::pair(interleaved_zero_bubble(two), 2)}) {
        const Timeline once = simulate(table, unit_costs(chunks));
        const Timeline thrice = simulate(repeated(table, 3), unit_costs(chunks));
        ASSERT_EQ(thrice.makespan, once.makespan + 2 * step_period(once))
            << table.name << " " << p << " " << m;
      }
    }
  }
}

TEST(ZeroBubble, InvalidShapesAreRejectedByName) {
  const Shape one{.ranks = 4, .micro_batches = 7}, two{.ranks = 4, .micro_batches = 7, .stages_per_rank = 2};
  EXPECT_THAT(error_of([&] { zero_bubble_h1(two); }),
              HasSubstr("zero_bubble_h1: stages_per_rank is 2; this schedule has one stage per rank"));
  EXPECT_THAT(error_of([&] { zero_bubble_h2(two); }), HasSubstr("zero_bubble_h2: stages_per_rank is 2"));
  EXPECT_THAT(error_of([&] { zero_bubble_v(one); }),
              HasSubstr("zero_bubble_v: stages_per_rank is 1; this schedule has two stages per rank in a V"));
  EXPECT_THAT(error_of([&] { dual_pipe_v(one); }), HasSubstr("dual_pipe_v: stages_per_rank is 1"));
  EXPECT_THAT(error_of([&] { v_shaped(one); }), HasSubstr("v_shaped: stages_per_rank is 1"));
  EXPECT_THAT(error_of([&] { dual_pipe_v(two); }),
              HasSubstr("dual_pipe_v: micro_batches is 7; 4 ranks need at least 8, one for each stage"));
  EXPECT_THAT(error_of([&] { interleaved_zero_bubble({.ranks = 4, .micro_batches = 11}); }),
              HasSubstr("micro_batches is 11, which is not a multiple of its 2 rounds"));
  EXPECT_THAT(error_of([&] { zero_bubble_h1({.ranks = 0}); }), HasSubstr("zero_bubble_h1: ranks is 0"));
  EXPECT_THAT(error_of([&] { zero_bubble(looped(one), {Costs{}}, 0.5); }),
              HasSubstr("memory_limit is 0.5; one micro-batch needs 1 on rank 0"));
  EXPECT_THAT(error_of([&] { zero_bubble(looped(one), {Costs{}}, 0); }), HasSubstr("memory_limit is 0"));
  EXPECT_THAT(error_of([&] { zero_bubble(looped(one), std::vector<Costs>(3)); }),
              HasSubstr("zero_bubble: costs has 3 entries"));
  EXPECT_THAT(error_of([&] { zero_bubble(looped(one), {Costs{.weight_input = -1}}); }),
              HasSubstr("costs[0] has a negative"));
}

TEST(ZeroBubble, TheSearchFindsH1AndH2AndTheVByItself) {
  for (int p = 2; p <= 6; ++p) {
    const int m = 2 * p;
    const Shape one{.ranks = p, .micro_batches = m};
    const Shape two{.ranks = p, .micro_batches = m, .stages_per_rank = 2};
    const auto found = [&](const Placement& placement, int chunks, double limit) {
      return simulate(zero_bubble(placement, unit_costs(chunks), limit), unit_costs(chunks));
    };
    EXPECT_EQ(found(looped(one), 1, p).makespan, simulate(zero_bubble_h1(one), unit_costs(1)).makespan) << p;
    const Timeline h2 = found(looped(one), 1, 2 * p - 1);
    EXPECT_EQ(in_units(h2.makespan), least_makespan(p, m, 1));
    EXPECT_EQ(bubble_share(h2), 0) << p;
    EXPECT_EQ(in_units(found(v_shaped(two), 2, p).makespan), least_makespan(p, m, 2)) << p;
  }
}

TEST(ZeroBubble, TheSearchIsNeverLongerThanTheKnownOrdersThatFit) {
  for (const auto& [f, i, w, hop] : {std::tuple(11, 13, 9, 2), {10, 15, 7, 0}, {10, 10, 10, 3}}) {
    for (int p = 2; p <= 5; ++p) {
      const Shape one{.ranks = p, .micro_batches = 2 * p};
      const Shape two{.ranks = p, .micro_batches = 2 * p, .stages_per_rank = 2};
      for (const Table& known : {zero_bubble_h1(one), zero_bubble_h2(one), zero_bubble_v(two)}) {
        auto costs = unit_costs(known.stages() / p, f, i, w);
        costs.front().transfer = hop * Duration{kUnit};
        const Timeline theirs = simulate(known, costs);
        const Placement placement{known.rank_of_stage, known.micro_batches};
        const Timeline found = simulate(zero_bubble(placement, costs, most(theirs.peak_live)), costs);
        ASSERT_LE(found.makespan, theirs.makespan) << known.name << " of " << p << " ranks";
        ASSERT_LE(most(found.peak_live), most(theirs.peak_live) + 1e-6);
      }
    }
  }
}

TEST(ZeroBubble, HalfTheMemoryOfTheVCostsLessThanOneForwardOneBackward) {
  for (int p = 4; p <= 8; p += 2) {
    const int m = 3 * p;
    const Timeline half = simulate(
        zero_bubble(v_shaped({.ranks = p, .micro_batches = m, .stages_per_rank = 2}), unit_costs(2), p / 2.0),
        unit_costs(2));
    EXPECT_LE(most(half.peak_live), p / 2.0 + 1e-9);
    EXPECT_LT(
        half.makespan,
        simulate(one_forward_one_backward(Shape{.ranks = p, .micro_batches = m}), unit_costs(1)).makespan);
  }
}

class ZeroBubbleSeed : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, ZeroBubbleSeed,
                         ::testing::Range<std::uint64_t>(1, 1 + number_from("TORCHSPAN_CASES",
                                                                            std::uint64_t{30})));

TEST_P(ZeroBubbleSeed, TheSearchKeepsToAnyMemoryLimitForAnyPlacementAndCosts) {
  std::mt19937_64 random(GetParam());
  const auto up_to = [&](unsigned top) { return static_cast<int>(random() % top); };
  const Placement placement = random_placement(random);
  SCOPED_TRACE(describe(placement));
  std::vector<Costs> costs;
  std::vector<double> one(static_cast<std::size_t>(placement.ranks), 0);
  for (const int rank : placement.rank_of_stage) {
    const double activation = up_to(5) / 4.0;
    costs.push_back({.forward = Duration{up_to(9)},
                     .input_gradient = Duration{up_to(9)},
                     .weight_gradient = Duration{up_to(9)},
                     .transfer = Duration{up_to(4)},
                     .activation = activation,
                     .weight_input = activation * up_to(3) / 2});
    one[static_cast<std::size_t>(rank)] += activation;
  }
  // From just enough for one micro-batch to enough for all.
  const double limit =
      most(one) * (1 + up_to(4 * static_cast<unsigned>(placement.micro_batches)) / 4.0) + 1e-6;
  const Table table = zero_bubble(placement, costs, limit);
  ASSERT_NO_THROW(validate(table));
  const Timeline timeline = simulate(table, costs);
  EXPECT_LE(most(timeline.peak_live), limit + 1e-6);
  for (const auto& live : timeline.live) {
    EXPECT_NEAR(live.empty() ? 0 : live.back(), 0, 1e-9);
  }
}

}  // namespace
}  // namespace torchspan::schedule::zero_bubble_test
