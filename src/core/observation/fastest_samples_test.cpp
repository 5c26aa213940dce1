#include <gtest/gtest.h>

#include "core/observation/trace_writer.h"

namespace torchspan::fastest_samples_test {
namespace {

using namespace std::chrono_literals;

/// A sample whose request and answer were under way for `delay` together.
ClockSample sample_of(int rank, TimePoint sent, Duration delay) {
  return {rank, sent, sent + 5s, sent + 6s, sent + 1s + delay};
}

TEST(FastestSamples, KeepOneOfEachRankInAWindow) {
  FastestSamples samples;
  const TimePoint begin(100s);
  samples.add({sample_of(1, begin, 3us), sample_of(2, begin, 9us)});
  EXPECT_EQ(samples.take_if_due(begin, 1ns).size(), 2u);
  EXPECT_TRUE(samples.take_if_due(begin + 10s, 10s).empty()) << "there are no others";
  samples.add({sample_of(1, begin + 11s, 7us), sample_of(2, begin + 11s, 4us)});
  samples.add({sample_of(1, begin + 12s, 5us), sample_of(2, begin + 12s, 4us)});
  samples.add({sample_of(1, begin + 13s, 6us)});
  EXPECT_TRUE(samples.take_if_due(begin + 19s, 10s).empty());
  const auto taken = samples.take_if_due(begin + 20s, 10s);
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].sent, begin + 12s);
  EXPECT_EQ(taken[1].sent, begin + 11s);
  samples.add({sample_of(2, begin + 21s, 1us)});
  EXPECT_EQ(samples.take(begin + 21s).size(), 1u) << "the end of a run does not wait for the window";
  EXPECT_TRUE(samples.take(begin + 22s).empty());
}

TEST(FastestSamples, DoNotDelayTheFirstOneOfARank) {
  FastestSamples samples;
  const TimePoint begin(100s);
  samples.add({sample_of(1, begin, 3us)});
  EXPECT_EQ(samples.take_if_due(begin, 1h).size(), 1u);
  samples.add({sample_of(1, begin + 1s, 3us), sample_of(4, begin + 1s, 9us), sample_of(4, begin + 2s, 5us)});
  const auto first = samples.take_if_due(begin + 2s, 1h);
  ASSERT_EQ(first.size(), 1u) << "a worker that joined later";
  EXPECT_EQ(first[0].rank, 4);
  EXPECT_EQ(first[0].sent, begin + 2s) << "the fastest so far";
  EXPECT_TRUE(samples.take_if_due(begin + 3s, 1h).empty()) << "written already";
  samples.add({sample_of(4, begin + 4s, 7us)});
  EXPECT_TRUE(samples.take_if_due(begin + 4s, 1h).empty()) << "the second one waits for the window";
  EXPECT_EQ(samples.take(begin + 5s).size(), 2u);
}

}  // namespace
}  // namespace torchspan::fastest_samples_test
