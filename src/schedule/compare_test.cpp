#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

#include "schedule/test_tables.h"
#include "tests/support/environment.h"

namespace torchspan::schedule::compare_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torchspan::testing::number_from;

double peak_of(const Candidate& candidate) {
  const auto& peaks = candidate.timeline.peak_live;
  return *std::max_element(peaks.begin(), peaks.end());
}

const Candidate& candidate_of(const Comparison& comparison, const std::string& name) {
  for (const Candidate& candidate : comparison.candidates) {
    if (candidate.table.name == name) return candidate;
  }
  throw_invalid("no candidate " + name);
}

TEST(Compare, PicksTheVForTheMemoryOfOneForwardOneBackward) {
  const Comparison comparison =
      compare({.ranks = 4, .micro_batches = 8, .costs = unit_costs(), .memory_limit = 4});
  const Candidate& best = comparison.candidates.front();
  EXPECT_EQ(best.table.name, "zbv");
  EXPECT_EQ(best.stages_per_rank, 2);
  EXPECT_EQ(in_units(best.timeline.makespan), 25.5);
  EXPECT_TRUE(best.fits);
  EXPECT_FALSE(candidate_of(comparison, "zb-h2").fits);
  EXPECT_FALSE(candidate_of(comparison, "gpipe").fits);
  EXPECT_TRUE(candidate_of(comparison, "1f1b").fits);
}

TEST(Compare, PicksASearchedOrderForLessMemoryThanAnyOther) {
  const Comparison comparison =
      compare({.ranks = 4, .micro_batches = 8, .costs = unit_costs(), .memory_limit = 2});
  EXPECT_EQ(comparison.candidates.front().table.name, "zero-bubble-v");
  EXPECT_LE(peak_of(comparison.candidates.front()), 2);
  for (const Candidate& candidate : comparison.candidates) {
    EXPECT_EQ(candidate.fits, candidate.table.name.starts_with("zero-bubble")) << candidate.table.name;
  }
}

TEST(Compare, ExplainsWhatIsNotDefined) {
  const Comparison comparison = compare({.ranks = 4, .micro_batches = 7, .costs = unit_costs()});
  EXPECT_THAT(comparison.undefined, ElementsAre(HasSubstr("interleaved: micro_batches is 7"),
                                                HasSubstr("dual_pipe_v: micro_batches is 7")));
}

TEST(Compare, ALimitInBytesCountsTheGraphOfARepeatedForward) {
  // Inputs of 1 MiB, and a graph of 8 MiB while one micro-batch's backward runs.
  constexpr double kMiB = 1024.0 * 1024;
  const std::vector<Costs> costs = {
      {.activation = kMiB, .weight_input = kMiB / 3, .recomputation = 8 * kMiB}};
  const Comparison comparison =
      compare({.ranks = 3, .micro_batches = 8, .costs = costs, .memory_limit = 11 * kMiB});
  EXPECT_TRUE(candidate_of(comparison, "1f1b").fits);
  EXPECT_FALSE(candidate_of(comparison, "gpipe").fits);
  EXPECT_TRUE(candidate_of(comparison, "zero-bubble").fits);
  EXPECT_THROW(compare({.ranks = 3, .micro_batches = 8, .costs = costs, .memory_limit = 8.5 * kMiB}), Error);
}

TEST(Compare, OneRankHasNothingToWaitFor) {
  const Comparison comparison = compare({.ranks = 1, .micro_batches = 3, .costs = unit_costs()});
  EXPECT_EQ(in_units(comparison.candidates.front().timeline.makespan), 9);
  EXPECT_EQ(peak_of(comparison.candidates.front()), 1);
}

TEST(Compare, RefusesWhatItCannotCompare) {
  const auto error_of = [](const CompareOptions& options) {
    try {
      compare(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      return error.message();
    }
    return std::string("accepted");
  };
  EXPECT_THAT(error_of({.ranks = 0}), HasSubstr("compare: ranks is 0"));
  EXPECT_THAT(error_of({.micro_batches = 0}), HasSubstr("compare: micro_batches is 0"));
  EXPECT_THAT(error_of({.ranks = 3, .costs = std::vector<Costs>(2)}), HasSubstr("costs has 2 entries"));
  EXPECT_THAT(error_of({.ranks = 2, .micro_batches = 2, .memory_limit = 0.5}),
              HasSubstr("one micro-batch needs 1 on rank 0"));
}

TEST(Compare, CostsAreDividedAmongTheStagesOfARank) {
  const std::vector<Costs> by_rank = {{.forward = Duration{30},
                                       .input_gradient = Duration{60},
                                       .weight_gradient = Duration{90},
                                       .transfer = Duration{7},
                                       .activation = 3,
                                       .weight_input = 1.5,
                                       .recomputation = 6},
                                      {.forward = Duration{5}}};
  const auto costs = divide_costs(by_rank, {0, 1, 0, 0});
  ASSERT_EQ(costs.size(), 4u);
  for (const std::size_t stage : {0, 2, 3}) {
    EXPECT_EQ(costs[stage].forward, Duration{10});
    EXPECT_EQ(costs[stage].input_gradient, Duration{20});
    EXPECT_EQ(costs[stage].weight_gradient, Duration{30});
    EXPECT_EQ(costs[stage].transfer, Duration{7});
    EXPECT_EQ(costs[stage].activation, 1);
    EXPECT_EQ(costs[stage].weight_input, 0.5);
    EXPECT_EQ(costs[stage].recomputation, 2);
  }
  EXPECT_EQ(costs[1].forward, Duration{5});
  EXPECT_EQ(costs[1].weight_input, std::nullopt);
  EXPECT_THROW(divide_costs(by_rank, {0, 1, 2}), Error);
}

class CompareSeed : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, CompareSeed,
                         ::testing::Range<std::uint64_t>(1, 1 + number_from("TORCHSPAN_CASES",
                                                                            std::uint64_t{8})));

TEST_P(CompareSeed, TheFirstFitsAndNoOtherThatFitsIsShorter) {
  std::mt19937_64 random(GetParam());
  const auto up_to = [&](unsigned most) { return static_cast<int>(random() % most); };
  CompareOptions options{.ranks = 1 + up_to(6), .micro_batches = 1 + up_to(12), .costs = {}};
  for (int rank = 0; rank < options.ranks; ++rank) {
    options.costs.push_back({.forward = Duration{2 * up_to(9)},
                             .input_gradient = Duration{2 * up_to(9)},
                             .weight_gradient = Duration{2 * up_to(9)},
                             .transfer = Duration{up_to(4)}});
  }
  options.memory_limit = 1 + up_to(12) / 2.0;
  const Comparison comparison = compare(options);
  const Candidate& best = comparison.candidates.front();
  EXPECT_TRUE(best.fits);
  for (const Candidate& candidate : comparison.candidates) {
    ASSERT_NO_THROW(validate(candidate.table));
    EXPECT_EQ(candidate.fits, peak_of(candidate) <= options.memory_limit) << candidate.table.name;
    if (candidate.fits) {
      EXPECT_LE(best.timeline.makespan, candidate.timeline.makespan) << candidate.table.name;
    }
  }
}

}  // namespace
}  // namespace torchspan::schedule::compare_test
