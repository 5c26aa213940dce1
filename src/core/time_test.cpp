#include <gtest/gtest.h>

#include <torchspan/core/time.h>

namespace torchspan::time_test {
namespace {

using namespace std::chrono_literals;

TEST(Deadline, NeverPassesByDefault) {
  const Deadline deadline;
  EXPECT_TRUE(deadline.is_never());
  EXPECT_EQ(deadline, Deadline::never());
  EXPECT_FALSE(deadline.passed(TimePoint(24h * 365 * 100)));
  EXPECT_EQ(deadline.left(TimePoint(1h)), Duration::max());
}

TEST(Deadline, PassesAtItsTime) {
  const Deadline deadline(TimePoint(10s));
  EXPECT_FALSE(deadline.passed(TimePoint(10s - 1ns)));
  EXPECT_TRUE(deadline.passed(TimePoint(10s)));
  EXPECT_EQ(deadline.left(TimePoint(4s)), 6s);
  EXPECT_EQ(deadline.left(TimePoint(11s)), 0s);
  EXPECT_EQ(deadline.at(), TimePoint(10s));
}

TEST(Deadline, ComparesByTimeWithNeverLast) {
  const Deadline soon(TimePoint(1s)), late(TimePoint(2s));
  EXPECT_LT(soon, late);
  EXPECT_LT(late, Deadline::never());
  EXPECT_EQ(earlier(late, soon), soon);
  EXPECT_EQ(earlier(soon, Deadline::never()), soon);
}

}  // namespace
}  // namespace torchspan::time_test
