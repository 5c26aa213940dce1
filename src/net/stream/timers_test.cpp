#include <gtest/gtest.h>

#include "net/stream/driver_context.h"

namespace torchspan::net::timers_test {
namespace {

constexpr TimePoint at(int milliseconds) { return TimePoint{} + std::chrono::milliseconds(milliseconds); }

TEST(Timers, FireInTheOrderOfTheirTimes) {
  Timers timers;
  timers.set(1, at(30));
  timers.set(2, at(10));
  timers.set(3, at(20));
  EXPECT_EQ(timers.next().at(), at(10));
  EXPECT_EQ(timers.take_due(at(9)), std::nullopt);
  EXPECT_EQ(timers.take_due(at(25)), 2u);
  EXPECT_EQ(timers.take_due(at(25)), 3u);
  EXPECT_EQ(timers.take_due(at(25)), std::nullopt);
  EXPECT_EQ(timers.next().at(), at(30));
  EXPECT_EQ(timers.of(2), std::nullopt) << "it fired";
}

TEST(Timers, AreReplacedAndStopped) {
  Timers timers;
  timers.set(1, at(10));
  timers.set(1, at(50));
  EXPECT_EQ(timers.of(1), at(50));
  EXPECT_EQ(timers.take_due(at(20)), std::nullopt);
  timers.set(1, std::nullopt);
  EXPECT_EQ(timers.of(1), std::nullopt);
  EXPECT_TRUE(timers.next().is_never());
  timers.set(7, std::nullopt);
  EXPECT_EQ(timers.take_due(TimePoint::max()), std::nullopt);
}

TEST(Timers, AtTheEndOfTimeNeverFire) {
  Timers timers;
  timers.set(1, TimePoint::max());
  EXPECT_EQ(timers.of(1), TimePoint::max());
  EXPECT_TRUE(timers.next().is_never());
  EXPECT_EQ(timers.take_due(TimePoint::max()), std::nullopt);
}

}  // namespace
}  // namespace torchspan::net::timers_test
