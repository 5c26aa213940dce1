#include <atomic>
#include <deque>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>

#include <torchspan/detail/core/runtime.h>

#include "core/api/sim_executor.h"
#include "core/async/trials.h"

namespace torchspan::spans_test {
namespace {

using namespace std::chrono_literals;

TEST(SpanRecorder, RecordsKindNameTimesAndId) {
  SimExecutor executor(1);
  executor.run([&] {
    SpanRecorder ring(executor, 4);
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

TEST(SpanRecorder, KeepsTheLastSpansOldestFirstHoweverManyWereRecorded) {
  for_seeds(50, [](SimExecutor& executor) {
    const std::size_t capacity = executor.random() % 7;
    SpanRecorder ring(executor, capacity);
    std::deque<std::uint64_t> expected;
    const std::uint64_t total = executor.random() % 30;
    for (std::uint64_t id = 0; id < total; ++id) {
      ring.record(SpanKind::kUser, "span", executor.now(), id);
      expected.push_back(id);
      if (expected.size() > std::max<std::size_t>(capacity, 1)) expected.pop_front();
      std::deque<std::uint64_t> ids;
      for (const SpanRecord& span : ring.snapshot()) ids.push_back(span.id);
      EXPECT_EQ(ids, expected);
    }
    EXPECT_EQ(ring.recorded(), total);
  });
}

TEST(SpanRecorder, TruncatesLongNames) {
  const auto executor = make_executor();
  SpanRecorder ring(*executor, 2);
  const std::string longest(120, 'n');
  ring.record(SpanKind::kUser, longest, executor->now());
  ring.record(SpanKind::kUser, longest + "more", executor->now());
  const auto spans = ring.snapshot();
  ASSERT_EQ(spans.size(), 2u);
  for (const SpanRecord& span : spans) EXPECT_EQ(span.name.data(), longest);
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

TEST(SpanRecorder, TakesSpansOfSeveralThreadsWhileItIsRead) {
  const auto executor = make_executor();
  SpanRecorder ring(*executor, 100);
  {
    std::vector<Thread> threads;
    for (std::uint64_t i = 0; i < 3; ++i) {
      threads.push_back(executor->spawn("records", [&, i] {
        for (int n = 0; n < 500; ++n) ring.record(SpanKind::kUser, std::to_string(i), executor->now(), i);
      }));
    }
    for (int n = 0; n < 50; ++n) {
      for (const SpanRecord& span : ring.snapshot()) EXPECT_EQ(span.name.data(), std::to_string(span.id));
    }
  }
  EXPECT_EQ(ring.recorded(), 1500u);
  EXPECT_EQ(ring.snapshot().size(), 300u);
}

TEST(SpanRecorder, LosesNoMoreThanItReportsWhileAWriterLapsTheReader) {  // ring_torn
  const auto executor = make_executor();
  SpanRecorder recorder(*executor, 16);
  constexpr std::uint64_t kSpans = 200000;
  std::vector<StoredSpan> spans;
  SpanRecorder::Cursor cursor;
  std::atomic<bool> ended{false};
  const Thread writer = executor->spawn("writer", [&] {
    for (std::uint64_t i = 1; i <= kSpans; ++i) {
      recorder.record(SpanKind::kCall, "call", TimePoint(Duration(static_cast<std::int64_t>(i))),
                      {.id = i, .peer = static_cast<int>(i), .part = -static_cast<int>(i), .bytes = i * 3});
    }
    ended = true;
  });
  while (!ended) recorder.read(cursor, spans);
  recorder.read(cursor, spans);
  EXPECT_EQ(spans.size() + cursor.lost, kSpans);
  std::uint64_t last = 0;
  for (const StoredSpan& span : spans) {
    const std::uint64_t i = span.link.id;
    ASSERT_GT(i, last);
    last = i;
    ASSERT_EQ(span.begin, static_cast<std::int64_t>(i));
    ASSERT_EQ(span.link.peer, static_cast<int>(i));
    ASSERT_EQ(span.link.part, -static_cast<int>(i));
    ASSERT_EQ(span.link.bytes, i * 3);
  }
  EXPECT_EQ(last, kSpans);
}

TEST(SpanRecorder, CountsTheSpansOfThreadsThatItHasNoRoomFor) {
  const auto executor = make_executor();
  SpanRecorder recorder(*executor, 4);
  {
    std::atomic<int> waiting{0};
    std::vector<Thread> threads;
    for (int i = 0; i < 130; ++i) {
      threads.push_back(executor->spawn("t", [&] {
        recorder.record(SpanKind::kUser, "x", executor->now());
        ++waiting;
        while (waiting < 130) executor->yield();
      }));
    }
  }
  SpanRecorder::Cursor cursor;
  std::vector<StoredSpan> spans;
  recorder.read(cursor, spans);
  EXPECT_EQ(spans.size(), 120u);
  EXPECT_EQ(cursor.lost, 10u);
  EXPECT_EQ(recorder.recorded(), 130u);
}

TEST(SpanRecorder, GivesNewNamesOneSharedNumberWhenItsTableIsFull) {
  const auto executor = make_executor();
  SpanRecorder recorder(*executor, 8192);
  for (int i = 0; i < 5000; ++i) recorder.record(SpanKind::kUser, std::to_string(i), executor->now());
  EXPECT_EQ(recorder.names_from(0).size(), 4096u);
  const auto spans = recorder.snapshot();
  EXPECT_EQ(spans.at(4094).name, "4094");
  EXPECT_EQ(spans.at(4095).name, "(other names)");
  EXPECT_EQ(spans.at(4999).name, "(other names)");
}

TEST(SpanScope, IsListedAsOpenUntilItEndsOnAnyThread) {
  const auto executor = make_executor();
  SpanRecorder recorder(*executor);
  auto first = std::make_unique<SpanScope>(recorder, SpanKind::kCollective, "all_reduce",
                                           SpanLink{.id = 7, .bytes = 64});
  auto second = std::make_unique<SpanScope>(recorder, SpanKind::kUser, "step");
  auto open = recorder.open();
  ASSERT_EQ(open.size(), 2u);
  EXPECT_EQ(open[0].name, "all_reduce");
  EXPECT_EQ(open[0].link.id, 7u);
  EXPECT_EQ(open[1].name, "step");
  executor->spawn("ends", [&] { first.reset(); }).join();
  second.reset();
  EXPECT_TRUE(recorder.open().empty());
  SpanRecorder::Cursor cursor;
  std::vector<StoredSpan> spans;
  recorder.read(cursor, spans);
  ASSERT_EQ(spans.size(), 2u);
  for (const StoredSpan& span : spans) EXPECT_EQ(span.nested, span.kind == SpanKind::kUser);
}

}  // namespace
}  // namespace torchspan::spans_test
