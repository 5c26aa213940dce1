#include "launch/trace/clock_fit.h"

#include <cmath>
#include <gtest/gtest.h>
#include <random>

#include <torchspan/core/error.h>

namespace torchspan::launch::clock_fit_test {
namespace {

/// Two clocks with an offset and a drift, and a network between them.
struct Clocks {
  double offset = 0;  ///< of the other clock at reference time 0
  double drift = 0;
  std::mt19937_64 random{1};
  double forth = 50e3, back = 50e3;  ///< least delay of the two directions
  double jitter = 200e3;             ///< mean of an exponential delay on top

  std::int64_t other(double reference) const {
    return static_cast<std::int64_t>(std::llround(reference + offset + drift * reference));
  }
  static TimePoint at(double time) { return TimePoint(Duration(std::llround(time))); }
  ClockSample probe(double sent) {
    std::exponential_distribution<double> wait(1 / std::max(jitter, 1e-9));
    const double received = sent + forth + wait(random);
    const double answered = received + 10e3;
    const double arrived = answered + back + wait(random);
    return {1, at(sent), TimePoint(Duration(other(received))), TimePoint(Duration(other(answered))),
            at(arrived)};
  }
  std::vector<ClockSample> probes(int count, double every) {
    std::vector<ClockSample> samples;
    for (int i = 0; i < count; ++i) samples.push_back(probe(7e12 + i * every));
    return samples;
  }
};

void expect_within_bound(const Clocks& clocks, const ClockLine& line, double from, double to) {
  for (int i = 0; i <= 20; ++i) {
    const double truth = from + (to - from) * i / 20;
    const auto found = static_cast<double>(line.to_reference(clocks.other(truth)));
    EXPECT_LE(std::abs(found - truth), line.error_at(std::llround(truth)) * 1.01 + 2) << "at " << truth;
  }
}

TEST(ClockFit, FindsOffsetAndDriftWithinItsBound) {  // clock_skew
  std::random_device seeds;
  for (int trial = 0; trial < 300; ++trial) {
    const auto seed = seeds();
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Clocks clocks;
    clocks.random.seed(seed);
    std::uniform_real_distribution<double> offset(-1e15, 1e15), drift(-100e-6, 100e-6);
    clocks.offset = offset(clocks.random);
    clocks.drift = drift(clocks.random);
    const int count = 20 + trial;
    const ClockLine line = fit_clock(clocks.probes(count, 500e6));
    expect_within_bound(clocks, line, 7e12 - 5e9, 7e12 + count * 500e6 + 5e9);
    EXPECT_LT(line.error, 2e6) << "the bound says little";
    EXPECT_NEAR(line.drift, clocks.drift, 2 * line.error / (count * 500e6 * 0.5));
  }
}

TEST(ClockFit, KeepsTheTruthWithinItsBoundIfTheDelaysDiffer) {  // clock_asymmetric
  for (const double share : {0.0, 0.1, 0.9, 1.0}) {
    Clocks clocks;
    clocks.offset = -123456789e3;
    clocks.drift = 40e-6;
    clocks.forth = 2e6 * share;
    clocks.back = 2e6 * (1 - share);
    const ClockLine line = fit_clock(clocks.probes(100, 500e6));
    expect_within_bound(clocks, line, 7e12, 7e12 + 50e9);
    EXPECT_GE(line.error, 0.9e6);
  }
}

TEST(ClockFit, UsesOneSampleWithAGrowingBound) {
  Clocks clocks;
  clocks.offset = 5e9;
  clocks.drift = 90e-6;
  const ClockLine line = fit_clock(clocks.probes(1, 1));
  expect_within_bound(clocks, line, 7e12 - 60e9, 7e12 + 60e9);
}

TEST(ClockFit, IgnoresImpossibleSamples) {
  Clocks clocks;
  clocks.offset = 1e9;
  auto samples = clocks.probes(10, 500e6);
  const ClockLine expected = fit_clock(samples);
  const TimePoint first(Duration::min()), last(Duration::max());
  samples.push_back({1, last, first, last, first});
  samples.push_back({1, first, last, first, last});
  samples.push_back(
      {1, TimePoint(Duration(10)), TimePoint(Duration(0)), TimePoint(Duration(50)), TimePoint(Duration(20))});
  EXPECT_EQ(fit_clock(samples).offset, expected.offset);
  EXPECT_THROW(fit_clock({}), Error);
  EXPECT_THROW(fit_clock({samples.back()}), Error);
}

}  // namespace
}  // namespace torchspan::launch::clock_fit_test
