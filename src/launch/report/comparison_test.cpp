#include "launch/report/comparison.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include "launch/report/browser.h"
#include "launch/report/report_page.h"
#include "launch/trace/example_traces.h"

namespace torchspan::launch::comparison_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kMs = 1'000'000;

/// A run of one worker with steps of these lengths, calls that take `call`, and some memory.
TraceSet run_of(const std::vector<std::int64_t>& steps, std::int64_t call = kMs,
                std::uint64_t memory = 1 << 20) {
  ExampleTrace worker(0), peer(1);
  std::int64_t at = kMs;
  std::uint64_t number = 0;
  for (const std::int64_t length : steps) {
    worker.span(SpanKind::kUser, "step", at, at + length, {.id = ++number});
    worker.span(SpanKind::kCall, "lookup", at, at + call, {.id = number, .peer = 1, .bytes = 10});
    peer.span(SpanKind::kHandler, "lookup", at, at + call / 2, {.id = number, .peer = 0, .bytes = 20});
    at += length;
  }
  worker.contents().counters.push_back({kMs, {{"process.resident_bytes", memory}}});
  worker.contents().identity.run = "earlier";
  peer.contents().identity.run = "earlier";
  return align_traces({worker.contents(), peer.contents()});
}

RunComparison compare(const TraceSet& before, const TraceSet& after) {
  return compare_runs(before, examine_run(before), after, examine_run(after));
}

const ComparedFigure* find(const RunComparison& comparison, const std::string& name) {
  const auto found = std::ranges::find(comparison.figures, name, &ComparedFigure::name);
  return found == comparison.figures.end() ? nullptr : &*found;
}

std::vector<std::int64_t> around(std::int64_t middle, std::int64_t spread, std::size_t count,
                                 std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> lengths(count);
  for (std::int64_t& length : lengths)
    length = middle + std::uniform_int_distribution<std::int64_t>(-spread, spread)(random);
  return lengths;
}

TEST(Comparison, ShowsMediansOfStepsFunctionsTrafficAndMemory) {
  const TraceSet before = run_of({10 * kMs, 11 * kMs, 12 * kMs}, 2 * kMs, 1 << 20);
  const TraceSet after = run_of({20 * kMs, 22 * kMs, 24 * kMs, 22 * kMs}, kMs, 3 << 20);
  const RunComparison comparison = compare(before, after);
  EXPECT_EQ(comparison.run, "earlier");
  const ComparedFigure* step = find(comparison, "median step");
  ASSERT_NE(step, nullptr);
  EXPECT_EQ(step->before, 11 * kMs);
  EXPECT_EQ(step->after, 22 * kMs);
  EXPECT_EQ(step->change(), "2.0 times");
  const ComparedFigure* call = find(comparison, "call of 'lookup', p50");
  ASSERT_NE(call, nullptr);
  EXPECT_EQ(call->change(), "-50 %");
  EXPECT_EQ(call->is_clear, std::nullopt) << "the trace has one median";
  const ComparedFigure* bytes = find(comparison, "bytes of all calls");
  ASSERT_NE(bytes, nullptr);
  EXPECT_EQ(bytes->before, 90);
  EXPECT_EQ(bytes->after, 120);
  const ComparedFigure* memory = find(comparison, "largest memory of a process");
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(memory->text(memory->after), "3.0 MiB");
  EXPECT_TRUE(comparison.notes.empty());
}

/// Runs with equal steps differ clearly in at most some of the trials; runs whose steps take 15 % longer always do.
TEST(Comparison, TellsADifferenceFromTheVariationOfTheSteps) {
  constexpr int kTrials = 200;
  int false_alarms = 0;
  for (std::uint64_t seed = 0; seed < kTrials; ++seed) {
    const TraceSet one = run_of(around(10 * kMs, kMs, 60, 3 * seed)),
                   same = run_of(around(10 * kMs, kMs, 60, 3 * seed + 1)),
                   slower = run_of(around(23 * kMs / 2, kMs, 60, 3 * seed + 2));
    false_alarms += find(compare(one, same), "median step")->is_clear.value() ? 1 : 0;
    EXPECT_TRUE(find(compare(one, slower), "median step")->is_clear.value()) << "seed " << seed;
  }
  EXPECT_LT(false_alarms, kTrials / 10);
}

TEST(Comparison, SaysWhatCannotBeCompared) {
  ExampleTrace program(0, 1);
  program.span(SpanKind::kUser, "progress", kMs, 2 * kMs, {.id = 1}).clock("other", "clock");
  const TraceSet before = align_traces({program.contents()});
  const RunComparison comparison = compare(before, run_of({10 * kMs}));
  EXPECT_EQ(find(comparison, "median step"), nullptr);
  EXPECT_THAT(describe_comparison(comparison),
              AllOf(HasSubstr("those of the earlier run come from reports of progress"),
                    HasSubstr("those of this one from spans named step"),
                    HasSubstr("numbers of workers differ: 1 in the earlier run, 2 in this one"),
                    HasSubstr("different hosts"), HasSubstr("no figures in common")));
}

TEST(Comparison, IsASectionOfThePage) {
  const TraceSet before = run_of({10 * kMs, 10 * kMs}), after = run_of({15 * kMs, 15 * kMs});
  const RunFigures figures = examine_run(after);
  const RunComparison comparison = compare(before, after);
  EXPECT_THAT(describe_comparison(comparison), HasSubstr("+50 %  median step: 15.0 ms, before 10.0 ms\n"));
  if (!has_browser()) GTEST_SKIP() << "there is no chromium";
  const Browsed with = browse(make_report_page(encode_report(after, figures, 100, &comparison)));
  EXPECT_THAT(with.console, Not(HasSubstr("CONSOLE")));
  EXPECT_THAT(with.page,
              HasSubstr("<td>median step</td><td>10.0 ms</td><td>15.0 ms</td><td>+50 %</td><td>clear</td>"));
  const Browsed without = browse(make_report_page(encode_report(after, figures, 100)));
  EXPECT_THAT(without.page, Not(HasSubstr("id=\"comparison\"")));
}

}  // namespace
}  // namespace torchspan::launch::comparison_test
