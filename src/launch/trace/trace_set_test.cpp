#include "launch/trace/trace_set.h"

#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>

#include <torchspan/core/error.h>

#include "launch/trace/example_traces.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::launch::trace_set_test {
namespace {

using ::testing::HasSubstr;

std::string error_of(std::vector<TraceContents> traces) {
  try {
    align_traces(std::move(traces));
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

/// Samples between rank 0 and a clock that is ahead by `ahead`.
void sample_clock(ExampleTrace& reference, int rank, std::int64_t ahead) {
  const auto at = [](std::int64_t time) { return TimePoint(Duration(time)); };
  for (std::int64_t sent = 0; sent < 10'000'000'000; sent += 500'000'000) {
    reference.contents().clock_samples.push_back(
        {rank, at(sent), at(sent + 20'000 + ahead), at(sent + 30'000 + ahead), at(sent + 50'000)});
  }
}

TEST(TraceSet, PutsHostsOnOneClock) {
  ExampleTrace here(0), there(1);
  there.clock("far", "other clock");
  constexpr std::int64_t kAhead = 11'560'000'000;
  sample_clock(here, 1, kAhead);
  here.span(SpanKind::kUser, "a", 1'000'000'000, 2'000'000'000);
  there.span(SpanKind::kUser, "b", 3'000'000'000 + kAhead, 4'000'000'000 + kAhead);
  const TraceSet set = align_traces({there.contents(), here.contents()});
  ASSERT_EQ(set.workers.size(), 2u);
  EXPECT_EQ(set.workers[0].contents.spans[0].begin, 0);
  EXPECT_NEAR(static_cast<double>(set.workers[1].contents.spans[0].begin), 2e9, 1);
  EXPECT_NEAR(static_cast<double>(set.length), 3e9, 1);
  EXPECT_GE(set.workers[1].clock_error, 20'000);
  EXPECT_LT(set.workers[1].clock_error, 60'000);
  EXPECT_EQ(set.workers[0].clock_error, 0);
}

TEST(TraceSet, RefusesAWorkerWhoseClockIsUnknown) {  // merge_refuses
  ExampleTrace here(0), there(1);
  there.clock("far", "other clock");
  here.span(SpanKind::kUser, "a", 1, 2);
  there.span(SpanKind::kUser, "b", 3, 4);
  EXPECT_THAT(error_of({here.contents(), there.contents()}),
              AllOf(HasSubstr("worker1 (rank 1, far)"), HasSubstr("worker0 (rank 0, node)")));
}

TEST(TraceSet, NeedsNoSamplesOnOneHost) {
  ExampleTrace first(0), second(1);
  first.span(SpanKind::kUser, "a", 100, 200);
  second.span(SpanKind::kUser, "b", 150, 300);
  const TraceSet set = align_traces({first.contents(), second.contents()});
  EXPECT_EQ(set.workers[1].contents.spans[0].begin, 50);
  EXPECT_EQ(set.length, 200);
  EXPECT_TRUE(set.notes.empty());
}

TEST(TraceSet, KeepsTheLastAttemptAndSaysWhatIsMissing) {
  ExampleTrace old(0, 3), first(0, 3), third(2, 3);
  first.contents().identity.attempt = third.contents().identity.attempt = 1;
  first.contents().identity.unix_began += 5;
  third.contents().identity.unix_began += 6;
  third.span(SpanKind::kUser, "b", 1, 2);
  third.contents().lost = 9;
  third.contents().complete = false;
  const TraceSet set = align_traces({old.contents(), first.contents(), third.contents()});
  EXPECT_EQ(set.workers.size(), 2u);
  ASSERT_EQ(set.notes.size(), 4u);
  EXPECT_THAT(set.notes[0], HasSubstr("1 trace of earlier"));
  EXPECT_THAT(set.notes[1], HasSubstr("no trace of rank 1 (of 3)"));
  EXPECT_THAT(set.notes[2], HasSubstr("worker2 (rank 2, node) lost 9 of 10 spans"));
  EXPECT_THAT(set.notes[3], HasSubstr("worker2 (rank 2, node) did not end its trace"));
}

TEST(TraceSet, NamesManyMissingRanksInShort) {
  ExampleTrace zero(0, 1000), seven(7, 1000);
  EXPECT_THAT(align_traces({zero.contents(), seven.contents()}).notes,
              ::testing::Contains(HasSubstr("no trace of ranks 1-6,8-999 (of 1000)")));
  ExampleTrace damaged(0, std::numeric_limits<int>::max());
  EXPECT_THAT(align_traces({damaged.contents()}).notes,
              ::testing::Contains(HasSubstr("no trace of ranks 1-1048575 (of 2147483647)")));
}

TEST(TraceSet, KeepsTheLastProcessOfAReplacedRank) {
  ExampleTrace zero(0), dead(1), replacement(1);
  dead.contents().identity.process = 700;
  replacement.contents().identity.process = 701;
  replacement.contents().identity.unix_began += 10;
  const TraceSet set = align_traces({replacement.contents(), zero.contents(), dead.contents()});
  ASSERT_EQ(set.workers.size(), 2u);
  EXPECT_EQ(set.workers[1].contents.identity.process, 701);
  ASSERT_EQ(set.notes.size(), 1u);
  EXPECT_THAT(set.notes[0], HasSubstr("replaced process 700"));
  EXPECT_THAT(error_of({}), HasSubstr("no trace"));
}

TEST(TraceSet, LeavesOutAnEarlierRunWithTheSameId) {  // without a launcher, the id is empty
  constexpr std::int64_t kSecond = 1'000'000'000, kLater = 100 * kSecond;
  std::vector<TraceContents> traces;
  for (int rank = 0; rank < 4; ++rank) {
    ExampleTrace old(rank, 4);
    old.span(SpanKind::kUser, "old", 1 * kSecond, 5 * kSecond);
    traces.push_back(old.contents());
  }
  for (int rank = 0; rank < 2; ++rank) {
    ExampleTrace fresh(rank, 2);
    fresh.contents().identity.began += kLater;
    fresh.contents().identity.unix_began += kLater;
    fresh.span(SpanKind::kUser, "fresh", kLater + 1 * kSecond, kLater + 3 * kSecond);
    traces.push_back(fresh.contents());
  }
  const TraceSet set = align_traces(traces);
  ASSERT_EQ(set.workers.size(), 2u);
  EXPECT_EQ(set.length, 2 * kSecond);
  ASSERT_EQ(set.notes.size(), 1u);
  EXPECT_THAT(set.notes[0], HasSubstr("4 traces of earlier"));
}

TEST(TraceSet, KeepsAllProcessesOfARunInWhichOneTookTheRankOfAnother) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  ExampleTrace zero(0), dead(1), replacement(1);
  zero.span(SpanKind::kUser, "a", 0, 50 * kSecond);
  dead.span(SpanKind::kUser, "b", 0, 5 * kSecond);
  replacement.contents().identity.began += 30 * kSecond;
  replacement.contents().identity.unix_began += 30 * kSecond;
  replacement.span(SpanKind::kUser, "c", 31 * kSecond, 49 * kSecond);
  const TraceSet set = align_traces({zero.contents(), dead.contents(), replacement.contents()});
  EXPECT_EQ(set.workers.size(), 2u);
  ASSERT_EQ(set.notes.size(), 1u);
  EXPECT_THAT(set.notes[0], HasSubstr("replaced process"));
}

TEST(TraceSet, LeavesOutFilesThatCannotBeUsed) {
  const torchspan::testing::TemporaryFolder folder;
  const auto write = [&](const std::string& name, const Bytes& bytes) {
    std::ofstream(folder.path() + "/" + name + ".trace", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
  };
  TraceEncoder encoder;
  encoder.identity(ExampleTrace(0, 3).contents().identity);
  const Bytes good = encoder.take();
  write("empty", {});
  write("short", {good.begin(), good.end() - 1});
  std::filesystem::create_directory(folder.path() + "/folder.trace");
  EXPECT_THAT(torchspan::testing::invalid_text([&] { read_traces(folder.path()); }),
              AllOf(HasSubstr("no trace in '" + folder.path() + "' can be used"),
                    HasSubstr("empty.trace' is left out: this trace file is empty")));
  write("worker0", good);
  const TraceSet set = read_traces(folder.path());
  EXPECT_EQ(set.workers.size(), 1u);
  ASSERT_EQ(set.notes.size(), 5u);
  EXPECT_THAT(set.notes[0], HasSubstr("empty.trace' is left out"));
  EXPECT_THAT(set.notes[1], HasSubstr("folder.trace' is left out: it cannot be read: "));
  EXPECT_THAT(set.notes[2], HasSubstr("short.trace' is left out: this trace file has no identity"));
  EXPECT_THAT(set.notes[3], HasSubstr("no trace of ranks 1,2 (of 3)"));
}

TEST(TraceSet, NamesAFileThatIsLeftOutIfTheOthersCannotBeAligned) {
  const torchspan::testing::TemporaryFolder folder;
  const auto write = [&](const std::string& name, const Bytes& bytes) {
    std::ofstream(folder.path() + "/" + name + ".trace", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
  };
  for (int rank : {1, 2}) {
    ExampleTrace trace(rank, 3);
    if (rank == 2) trace.clock("far", "other clock");
    TraceEncoder encoder;
    encoder.identity(trace.contents().identity);
    write("worker" + std::to_string(rank), encoder.take());
  }
  write("worker0", {});
  const auto text = [&] { return torchspan::testing::invalid_text([&] { read_traces(folder.path()); }); };
  EXPECT_THAT(text(), AllOf(HasSubstr("the clock of worker2 (rank 2, far) cannot be compared"),
                            HasSubstr("worker0.trace' is left out: this trace file is empty")));
  write("x", {});
  EXPECT_THAT(text(), HasSubstr("(1 more is left out)"));
}

TEST(TraceSet, NamesTheFolderWithoutTraces) {
  const auto text = [](const std::string& folder) {
    try {
      read_traces(folder);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string();
  };
  EXPECT_THAT(text("/proc/self/fdinfo"), HasSubstr("there is no trace in '/proc/self/fdinfo'"));
  EXPECT_THAT(text("/nonexistent"), HasSubstr("folder '/nonexistent' cannot be read"));
}

}  // namespace
}  // namespace torchspan::launch::trace_set_test
