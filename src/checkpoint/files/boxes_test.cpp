#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include "checkpoint/files/manifest.h"

namespace torchspan::checkpoint::boxes_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Boxes, AreCoveredOnceBySplittingThemAtRandom) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Sizes shape;
    for (std::size_t d = random() % 4; d > 0; --d)
      shape.push_back(1 + static_cast<std::int64_t>(random() % 5));
    std::vector<Box> boxes{whole_box(shape)};
    for (int cut = 0; cut < 6 && !shape.empty(); ++cut) {
      const std::size_t which = random() % boxes.size();
      const std::size_t d = random() % shape.size();
      Box first = boxes[which], second = boxes[which];
      if (first.size[d] < 2) continue;
      const auto at = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(first.size[d] - 1));
      second.offset[d] += at;
      second.size[d] -= at;
      first.size[d] = at;
      boxes[which] = first;
      boxes.push_back(second);
    }
    EXPECT_THAT(coverage_fault(whole_box(shape), boxes), IsEmpty());
    std::vector<Box> fewer = boxes;
    fewer.pop_back();
    EXPECT_THAT(coverage_fault(whole_box(shape), fewer), HasSubstr("in no part"));
    std::vector<Box> twice = boxes;
    twice.push_back(boxes[random() % boxes.size()]);
    EXPECT_THAT(coverage_fault(whole_box(shape), twice), HasSubstr("overlap"));
  }
}

TEST(Boxes, CountElementsWithoutOverflow) {
  EXPECT_EQ(element_count({}), 1);
  EXPECT_EQ(element_count({3, 0, 9}), 0);
  EXPECT_EQ(element_count({std::int64_t{1} << 40, std::int64_t{1} << 40}), std::nullopt);
  EXPECT_EQ(element_count({-1}), std::nullopt);
  EXPECT_FALSE(fits({{1}, {INT64_MAX}}, {5}));
  EXPECT_TRUE(fits({{1}, {4}}, {5}));
}

/// Only the UndefinedBehaviorSanitizer sees a sum that overflows: the overlap is found with any sum.
TEST(Boxes, ThatOverlapMayHaveMoreElementsThanANumberCounts) {
  const Box huge = whole_box({std::int64_t{1} << 62});
  EXPECT_THAT(coverage_fault(huge, std::vector<Box>(8, huge)), HasSubstr("overlap"));
}

}  // namespace torchspan::checkpoint::boxes_test
