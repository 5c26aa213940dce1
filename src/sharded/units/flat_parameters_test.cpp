#include "sharded/units/flat_parameters.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <random>

namespace torchspan::sharded::flat_parameters_test {
namespace {

TEST(FlatLayout, LargeParametersHaveASegmentAndSmallOnesShareTheLast) {
  std::set<std::int64_t> lengths;
  const FlatLayout layout({3, 100, 5, 101}, {4, 100}, lengths);
  ASSERT_EQ(layout.segments().size(), 3U);
  EXPECT_EQ(layout.segments()[0].chunk, 25);
  EXPECT_EQ(layout.segments()[1].chunk, 26);
  EXPECT_EQ(layout.segments()[2].chunk, 2);
  EXPECT_EQ(layout.segments()[2].parameters, (std::vector<std::size_t>{0, 2}));
  EXPECT_EQ(layout.shared(), 2U);
  EXPECT_EQ(layout.part_size(), 53);
  EXPECT_EQ(layout.size(), 4 * 53);
}

TEST(FlatLayout, SharedSegmentsOfUnitsDifferInLength) {
  std::set<std::int64_t> lengths;
  std::set<std::int64_t> shared;
  for (int unit = 0; unit < 5; ++unit) {
    const FlatLayout layout({8, 8}, {2, 8}, lengths);
    EXPECT_TRUE(shared.insert(layout.segments().back().chunk).second);
    EXPECT_EQ(layout.segments()[0].chunk, 4);
  }
}

TEST(FlatLayout, ParametersCoverTheirSegmentsWithoutOverlap) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937_64 random(seed);
    std::vector<std::int64_t> counts;
    for (std::size_t i = 0, n = random() % 8; i < n; ++i)
      counts.push_back(static_cast<std::int64_t>(random() % 40));
    const int ranks = 1 + static_cast<int>(random() % 5);
    std::set<std::int64_t> lengths;
    const std::int64_t alone = 1 + static_cast<std::int64_t>(random() % 30);
    const std::int64_t step = 1 + static_cast<std::int64_t>(random() % 9);
    const FlatLayout layout(counts, {ranks, alone, step}, lengths);
    std::int64_t begin = 0, part = 0;
    std::size_t parameters = 0;
    for (std::size_t s = 0; s < layout.segments().size(); ++s) {
      const Segment& segment = layout.segments()[s];
      EXPECT_EQ(segment.begin, begin);
      EXPECT_EQ(segment.part, part);
      EXPECT_EQ(segment.chunk % step, 0);
      std::int64_t at = begin;
      for (const std::size_t i : segment.parameters) {
        EXPECT_EQ(layout.segment_of(i), s);
        EXPECT_EQ(layout.offset(i), at);
        at += counts[i];
        ++parameters;
      }
      begin += segment.chunk * ranks;
      part += segment.chunk;
      EXPECT_LE(at, begin);
    }
    EXPECT_EQ(parameters, counts.size());
    EXPECT_EQ(layout.size(), begin);
    EXPECT_EQ(layout.part_size(), part);
  }
}

}  // namespace

}  // namespace torchspan::sharded::flat_parameters_test
