#include "core/api/saturated_time.h"

#include <gtest/gtest.h>

namespace torchspan::saturated_time_test {
namespace {

using std::chrono::hours;
using std::chrono::seconds;

TEST(SaturatedTime, SumsDurations) {
  EXPECT_EQ(saturated_sum(seconds(3), seconds(1)), seconds(4));
  EXPECT_EQ(saturated_sum(seconds(3), seconds(-4)), seconds(-1));
  EXPECT_EQ(saturated_sum(Duration::max(), seconds(1)), Duration::max());
  EXPECT_EQ(saturated_sum(seconds(1), Duration::max()), Duration::max());
  EXPECT_EQ(saturated_sum(Duration::max() - Duration(1), Duration(1)), Duration::max());
}

TEST(SaturatedTime, TakesAnOptionOfZeroForNoLimit) {
  EXPECT_EQ(no_limit_if_zero(Duration::zero()), Duration::max());
  EXPECT_EQ(no_limit_if_zero(seconds(3)), seconds(3));
}

TEST(SaturatedTime, HasDeadlinesThatNeverCome) {
  const TimePoint now(hours(5));
  EXPECT_EQ(deadline_after(now, hours(1)), Deadline(now + hours(1)));
  EXPECT_TRUE(deadline_after(now, Duration::max()).is_never());
  EXPECT_TRUE(deadline_after(now, Duration::max() - hours(1)).is_never());
  EXPECT_TRUE(deadline_after(TimePoint::max(), hours(1)).is_never());
}

}  // namespace
}  // namespace torchspan::saturated_time_test
