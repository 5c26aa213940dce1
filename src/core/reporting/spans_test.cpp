#include <deque>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>

#include <torchspan/detail/core/runtime.h>

#include "core/api/sim_executor.h"
#include "core/async/trials.h"

namespace torchspan::spans_test {
namespace {

using namespace std::chrono_literals;

TEST(SpanRing, RecordsKindNameTimesAndId) {
  SimExecutor executor(1);
  executor.run([&] {
    SpanRing ring(executor, 4);
    executor.sleep(1ms);
    const TimePoint begin = executor.now();
    executor.sleep(2ms);
    ring.record(SpanKind::kBucket, "bucket 3", begin, 77);
    const auto spans = ring.snapshot();
    ASSERT_EQ(spans.size(), 1u);
    EXPECT_EQ(spans[0].kind, SpanKind::kBucket);
    EXPECT_STREQ(spans[0].name.data(), "bucket 3");
    EXPECT_EQ(spans[0].begin, TimePoint(1ms));
    EXPECT_EQ(spans[0].end, TimePoint(3ms));
    EXPECT_EQ(spans[0].id, 77u);
  });
}

TEST(SpanRing, KeepsTheLastSpansOldestFirstHoweverManyWereRecorded) {
  for_seeds(50, [](SimExecutor& executor) {
    const std::size_t capacity = executor.random() % 7;
    SpanRing ring(executor, capacity);
    std::deque<std::uint64_t> expected;
    const std::uint64_t total = executor.random() % 30;
    for (std::uint64_t id = 0; id < total; ++id) {
      ring.record(SpanKind::kUser, "span", executor.now(), id);
      expected.push_back(id);
      if (expected.size() > std::max<std::size_t>(capacity, 1)) expected.pop_front();
      std::deque<std::uint64_t> ids;
      for (const Span& span : ring.snapshot()) ids.push_back(span.id);
      EXPECT_EQ(ids, expected);
    }
    EXPECT_EQ(ring.recorded(), total);
  });
}

TEST(SpanRing, TruncatesLongNamesWithATerminatingZero) {
  const auto executor = make_executor();
  SpanRing ring(*executor, 2);
  const std::string longest(46, 'n');
  ring.record(SpanKind::kUser, longest, executor->now());
  ring.record(SpanKind::kUser, longest + "more", executor->now());
  for (const Span& span : ring.snapshot()) EXPECT_EQ(span.name.data(), longest);
}

TEST(SpanScope, RecordsFromItsBeginningToItsEnd) {
  SimExecutor executor(1);
  executor.run([&] {
    Runtime runtime(executor, "w");
    {
      SpanScope outer(runtime.spans, SpanKind::kCall, std::string("outer"), 1);
      executor.sleep(1ms);
      SpanScope inner(runtime.spans, SpanKind::kWait, "inner", 2);
      executor.sleep(1ms);
    }
    const auto spans = runtime.spans.snapshot();
    ASSERT_EQ(spans.size(), 2u);
    EXPECT_STREQ(spans[0].name.data(), "inner");
    EXPECT_EQ(spans[0].begin, TimePoint(1ms));
    EXPECT_STREQ(spans[1].name.data(), "outer");
    EXPECT_EQ(spans[1].end - spans[1].begin, 2ms);
  });
}

TEST(SpanRing, TakesSpansOfSeveralThreadsWhileItIsRead) {
  const auto executor = make_executor();
  SpanRing ring(*executor, 100);
  {
    std::vector<Thread> threads;
    for (std::uint64_t i = 0; i < 3; ++i) {
      threads.push_back(executor->spawn("records", [&, i] {
        for (int n = 0; n < 500; ++n) ring.record(SpanKind::kUser, std::to_string(i), executor->now(), i);
      }));
    }
    for (int n = 0; n < 50; ++n) {
      for (const Span& span : ring.snapshot()) EXPECT_EQ(span.name.data(), std::to_string(span.id));
    }
  }
  EXPECT_EQ(ring.recorded(), 1500u);
  EXPECT_EQ(ring.snapshot().size(), 100u);
}

}  // namespace
}  // namespace torchspan::spans_test
