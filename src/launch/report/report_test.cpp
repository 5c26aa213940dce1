#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <random>
#include <unistd.h>

#include "core/api/span_kinds.h"
#include "launch/report/browser.h"
#include "launch/report/report_page.h"
#include "launch/report/verdict.h"
#include "launch/trace/example_traces.h"

namespace torchspan::launch::report_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kMs = 1'000'000;

/// Two ranks train with one bucket. Per step of 20 ms: forward 2 ms, backward 4 ms, reduction 2 ms; rank 1 loads its
/// batch 10 ms longer, for which rank 0 waits.
TraceSet late_rank(int steps = 5) {
  ExampleTrace fast(0), slow(1);
  for (int k = 1; k <= steps; ++k) {
    const std::int64_t begin = k * 20 * kMs;
    const auto id = static_cast<std::uint64_t>(k);
    const auto step = [&](ExampleTrace& trace, std::int64_t load) {
      const std::int64_t forward = begin + load, backward = forward + 2 * kMs, end = begin + 18 * kMs;
      trace.span(SpanKind::kBucket, "forward", forward, backward, {.id = id});
      trace.span(SpanKind::kBucket, "backward", backward, backward + 4 * kMs, {.id = id});
      trace.span(SpanKind::kBucket, "bucket 3", backward + 4 * kMs, end,
                 {.id = id, .part = 3, .bytes = 4096});
      trace.span(SpanKind::kBucket, "reduction", backward + 4 * kMs, end, {.id = id});
    };
    step(fast, 0);
    step(slow, 10 * kMs);
  }
  return align_traces({fast.contents(), slow.contents()});
}

TEST(RunFigures, FindTheLateRankAndItsBucket) {
  const TraceSet set = late_rank();
  const RunFigures figures = examine_run(set);
  EXPECT_EQ(figures.steps.source, "reductions");
  ASSERT_EQ(figures.steps.steps.size(), 5u);
  const ReductionTimes& fast = figures.reductions.workers.at(0);
  const ReductionTimes& slow = figures.reductions.workers.at(1);
  EXPECT_EQ(fast.late_peer, 5 * 10 * kMs);
  EXPECT_EQ(fast.transfer, 5 * 2 * kMs);
  EXPECT_EQ(slow.late_peer, 0);
  EXPECT_EQ(slow.transfer, 5 * 2 * kMs);
  EXPECT_EQ(fast.forward, 5 * 2 * kMs);
  EXPECT_EQ(slow.backward, 5 * 4 * kMs);
  // The first step begins with its forward, the others where the previous one ends.
  EXPECT_EQ(fast.whole, 18 * kMs + 4 * 20 * kMs);
  EXPECT_EQ(slow.whole, 8 * kMs + 4 * 20 * kMs);
  const BucketFigures& bucket = figures.reductions.buckets.at(3);
  EXPECT_EQ(bucket.skew, 5 * 10 * kMs);
  EXPECT_EQ(bucket.duration, 5 * 2 * kMs);
  EXPECT_EQ(bucket.hidden, 0);
  EXPECT_EQ(bucket.last.at(1), 5u);
  const auto findings = judge_run(set, figures);
  ASSERT_FALSE(findings.empty());
  EXPECT_NEAR(findings[0].share, 50.0 / 98, 1e-9);
  EXPECT_EQ(findings[0].text, "Rank 0 waits 51 % of its step time for rank 1, mostly for its bucket 3.");
  EXPECT_THAT(findings[0].advice, HasSubstr("rank 1 spends 9.6 ms outside forward, backward and reduction"));
}

/// As the guides recommend, the program has a span of each step; rank 1 sleeps in another one before its forward, and its
/// backward takes a little longer, too.
TEST(RunFigures, FindTheSpanOfTheProgramThatMakesARankLate) {
  for (const bool with_step : {true, false}) {
    ExampleTrace fast(0), slow(1);
    for (int k = 1; k <= 5; ++k) {
      const std::int64_t begin = k * 200 * kMs;
      const auto id = static_cast<std::uint64_t>(k);
      const auto step = [&](ExampleTrace& trace, std::int64_t load, std::int64_t backward_time) {
        const std::int64_t forward = begin + load, backward = forward + 2 * kMs, end = begin + 160 * kMs;
        if (with_step) trace.span(SpanKind::kUser, "step", begin, end + 5 * kMs, {.id = id});
        trace.span(SpanKind::kUser, "load", begin, forward, {}, true);
        if (load > kMs) trace.span(SpanKind::kUser, "augment", begin, begin + 120 * kMs, {}, true);
        trace.span(SpanKind::kBucket, "forward", forward, backward, {.id = id});
        trace.span(SpanKind::kBucket, "backward", backward, backward + backward_time, {.id = id});
        trace.span(SpanKind::kBucket, "bucket 0", backward + backward_time, end,
                   {.id = id, .part = 0, .bytes = 64});
        trace.span(SpanKind::kBucket, "reduction", backward + backward_time, end, {.id = id});
      };
      step(fast, kMs, 4 * kMs);
      step(slow, 121 * kMs, 31 * kMs);
    }
    const TraceSet set = align_traces({fast.contents(), slow.contents()});
    const RunFigures figures = examine_run(set);
    EXPECT_EQ(figures.steps.source, with_step ? "spans named step" : "reductions");
    if (with_step) {
      for (const ReductionTimes& times : figures.reductions.workers) EXPECT_EQ(times.whole, 5 * 165 * kMs);
      EXPECT_EQ(figures.reductions.workers.at(1).other(), 5 * (121 + 5) * kMs);
    }
    const auto findings = judge_run(set, figures);
    ASSERT_FALSE(findings.empty());
    EXPECT_THAT(findings[0].text, HasSubstr("for rank 1"));
    EXPECT_THAT(findings[0].advice, HasSubstr("outside forward, backward and reduction"));
    EXPECT_THAT(findings[0].advice,
                HasSubstr("It spends 120.0 ms in 'augment'; the others spend 0 ns there."));
  }
}

/// An action sends its result before it ends.
TEST(RunFigures, ExplainASimulatedStepThatIsLongerThanTheMeasuredOne) {
  ExampleTrace first(0), second(1);
  first.span(SpanKind::kPipeline, "0F0", 0, 10 * kMs, {.id = 1})
      .span(SpanKind::kPipeline, "0B0", 20 * kMs, 35 * kMs, {.id = 1});
  second.span(SpanKind::kPipeline, "1F0", 5 * kMs, 15 * kMs, {.id = 1})
      .span(SpanKind::kPipeline, "1B0", 15 * kMs, 30 * kMs, {.id = 1});
  const TraceSet set = align_traces({first.contents(), second.contents()});
  const auto findings = judge_run(set, examine_run(set));
  ASSERT_FALSE(findings.empty());
  EXPECT_THAT(findings[0].text,
              HasSubstr("the simulated step is longer than the measured one (50.0 ms and 35.0 ms)"));
  EXPECT_THAT(findings[0].advice, HasSubstr("An action sends its result before it ends"));
}

/// Two rounds in each step.
TEST(RunFigures, CountTheTimeOfAStepWithSeveralReductionsOnce) {
  ExampleTrace first(0), second(1);
  for (ExampleTrace* trace : {&first, &second}) {
    for (int k = 0; k < 3; ++k) {
      const std::int64_t begin = (1 + 50 * k) * kMs;
      trace->span(SpanKind::kUser, "step", begin, begin + 40 * kMs,
                  {.id = static_cast<std::uint64_t>(k + 1)});
      for (int half = 0; half < 2; ++half) {
        const std::uint64_t id = 2 * static_cast<std::uint64_t>(k) + (half == 0 ? 1 : 2);
        const std::int64_t forward = begin + (5 + 15 * half) * kMs, backward = forward + 2 * kMs,
                           end = backward + 6 * kMs;
        trace->span(SpanKind::kBucket, "forward", forward, backward, {.id = id});
        trace->span(SpanKind::kBucket, "backward", backward, end - kMs, {.id = id});
        trace->span(SpanKind::kBucket, "bucket 0", backward, end, {.id = id, .part = 0, .bytes = 64});
        trace->span(SpanKind::kBucket, "reduction", backward, end, {.id = id});
      }
    }
  }
  const RunFigures figures = examine_run(align_traces({first.contents(), second.contents()}));
  for (const ReductionTimes& times : figures.reductions.workers) EXPECT_EQ(times.whole, 3 * 40 * kMs);
}

/// Two workers report their progress; the second one reports every other step.
TEST(RunFigures, TakeStepsFromReportsOfProgressIfThereIsNothingBetter) {
  ExampleTrace first(0), second(1);
  for (std::int64_t step = 2; step <= 9; ++step)
    first.span(SpanKind::kUser, "progress", (step - 1) * 10 * kMs, step * 10 * kMs,
               {.id = static_cast<std::uint64_t>(step)});
  for (std::int64_t step = 4; step <= 8; step += 2)
    second.span(SpanKind::kUser, "progress", (step - 2) * 10 * kMs, step * 10 * kMs,
                {.id = static_cast<std::uint64_t>(step)});
  const TraceSet set = align_traces({first.contents(), second.contents()});
  const TrainingSteps steps = find_steps(set);
  EXPECT_EQ(steps.source, "reports of progress");
  ASSERT_EQ(steps.steps.size(), 8u);
  EXPECT_EQ(steps.steps[0].number, 2u);
  EXPECT_EQ(steps.steps[0].by_worker[0].length(), 10 * kMs);
  EXPECT_EQ(steps.steps[0].by_worker[1].length(), 0);
  EXPECT_EQ(steps.steps[2].by_worker[1].length(), 20 * kMs);
  first.span(SpanKind::kUser, "step", kMs, 2 * kMs, {.id = 1});
  EXPECT_EQ(find_steps(align_traces({first.contents()})).source, "spans named step");
}

TEST(RunFigures, SumCallsByFunction) {
  ExampleTrace caller(0), callee(1);
  for (int i = 1; i <= 100; ++i) {
    const auto id = static_cast<std::uint64_t>(i);
    const std::int64_t begin = i * 1000;
    caller.span(SpanKind::kCall, "f", begin, begin + i, {.id = id, .peer = 1, .bytes = 10});
    callee.span(SpanKind::kHandler, "f", begin, begin + i / 2, {.id = id, .peer = 0, .bytes = 7});
  }
  const Calls calls = examine_calls(align_traces({caller.contents(), callee.contents()}));
  ASSERT_EQ(calls.functions.size(), 1u);
  EXPECT_EQ(calls.functions[0].calls, 100u);
  EXPECT_EQ(calls.functions[0].p50, 50);
  EXPECT_EQ(calls.functions[0].p99, 99);
  EXPECT_EQ(calls.functions[0].longest, 100);
  EXPECT_EQ(calls.functions[0].served_p50, 25);
  EXPECT_EQ(calls.functions[0].total, 5050);
  EXPECT_EQ(calls.traffic.at({0, 1}).bytes, 700u);
  EXPECT_EQ(calls.traffic.at({1, 0}).bytes, 1000u);
  ASSERT_EQ(calls.callers.size(), 1u);
  EXPECT_EQ(calls.callers[0].waiting, 5050);
}

TEST(RunFigures, SumModulesOfAllRanks) {
  ExampleTrace first(0), second(1);
  const auto forward = [](ExampleTrace& trace, const char* module, std::int64_t begin, std::int64_t length,
                          std::uint64_t node) {
    trace.span(kModuleSpan, module, begin, begin + length, {.id = node, .peer = 0, .part = 1, .bytes = 1});
  };
  forward(first, "net.a", 0, 10, 1);
  forward(first, "net.b", 100, 30, 2);
  forward(second, "net.b", 0, 50, 1);
  second.span(kOperatorSpan, "node", 200, 207, {.id = 1, .part = 1});
  const auto modules = examine_run(align_traces({first.contents(), second.contents()})).modules;
  ASSERT_EQ(modules.size(), 3u);
  EXPECT_EQ(modules[0].name, "net");
  EXPECT_EQ(modules[0].forward.total, 130 + 50) << "from its first operator to its last";
  EXPECT_EQ(modules[0].backward.total, 7);
  EXPECT_EQ(modules[1].name, "net.b");
  EXPECT_EQ(modules[1].forward.count, 2u);
  EXPECT_EQ(modules[1].forward.total, 80);
  EXPECT_EQ(modules[1].forward.p50, 30);
  EXPECT_EQ(modules[1].backward.count, 1u);
  EXPECT_EQ(modules[2].name, "net.a");
  EXPECT_EQ(modules[2].backward.count, 0u);
}

TEST(RunFigures, ComparePipelinesWithTheirSimulation) {
  // Two stages, two micro-batches; stage 1 starts its first forward 3 ms late.
  ExampleTrace first(0), second(1);
  const auto add = [](ExampleTrace& trace, const char* name, std::int64_t begin, std::int64_t end) {
    trace.span(SpanKind::kPipeline, name, begin * kMs, end * kMs, {.id = 7, .part = 0});
  };
  add(first, "0F0", 0, 1);
  add(first, "0F1", 1, 2);
  add(first, "0B0", 7, 9);
  add(first, "0B1", 10, 12);
  add(second, "1F0", 4, 5);
  add(second, "1B0", 5, 7);
  add(second, "1F1", 7, 8);
  add(second, "1B1", 8, 10);
  const auto pipeline = examine_pipeline(align_traces({first.contents(), second.contents()}));
  ASSERT_TRUE(pipeline);
  EXPECT_EQ(pipeline->steps, 1u);
  EXPECT_EQ(pipeline->measured.makespan, std::chrono::milliseconds(12));
  EXPECT_NEAR(pipeline->idle, 0.5, 1e-9);
  ASSERT_TRUE(pipeline->simulated);
  EXPECT_EQ(pipeline->simulated->makespan, std::chrono::milliseconds(9));
  EXPECT_FALSE(parse_action("F"));
  EXPECT_FALSE(parse_action("1X2"));
  EXPECT_FALSE(parse_action("1F2x"));
  EXPECT_FALSE(parse_action("99999999999F0"));
}

TEST(RunFigures, MeasurePipelineStepsWithABackwardIfThereAreAny) {
  ExampleTrace trace(0);
  const auto add = [&](const char* name, std::int64_t begin, std::int64_t end, std::uint64_t step) {
    trace.span(SpanKind::kPipeline, name, begin * kMs, end * kMs, {.id = step, .part = 0});
  };
  for (std::uint64_t step = 10; step < 20; ++step) {
    const auto begin = static_cast<std::int64_t>(100 * step);
    add("0F0", begin, begin + 1, step);
  }
  auto set = align_traces({trace.contents()});
  EXPECT_EQ(examine_pipeline(set)->steps, 10u) << "a program that only evaluates";
  EXPECT_EQ(find_steps(set).steps.size(), 10u);
  add("0F0", 0, 4, 1);
  add("0B0", 4, 12, 1);
  set = align_traces({trace.contents()});
  const auto pipeline = examine_pipeline(set);
  ASSERT_TRUE(pipeline);
  EXPECT_EQ(pipeline->steps, 1u);
  EXPECT_EQ(pipeline->left_out, 10u);
  EXPECT_EQ(pipeline->measured.makespan, std::chrono::milliseconds(12));
  ASSERT_EQ(find_steps(set).steps.size(), 1u);
  EXPECT_EQ(find_steps(set).steps[0].number, 1u);
}

TEST(Verdict, NamesTheRankThatStartsCollectiveOperationsLast) {
  ExampleTrace first(0), second(1);
  for (std::uint64_t i = 0; i < 10; ++i) {
    // Rank 1 starts 40 ms after rank 0; the operation ends 20 ms later. Every 100 ms.
    const auto begin = static_cast<std::int64_t>(i) * 100 * kMs;
    first.span(SpanKind::kCollective, "all_gather", begin, begin + 60 * kMs, {.id = i, .part = 5});
    second.span(SpanKind::kCollective, "all_gather", begin + 40 * kMs, begin + 60 * kMs,
                {.id = i, .part = 5});
  }
  first.span(SpanKind::kUser, "rest", 0, 1000 * kMs, {});
  const TraceSet set = align_traces({first.contents(), second.contents()});
  const auto figures = examine_run(set);
  ASSERT_EQ(figures.collectives.size(), 2u);
  EXPECT_EQ(figures.collectives[0].under_way, 600 * kMs);
  EXPECT_EQ(figures.collectives[0].later.at(1), 400 * kMs);
  EXPECT_TRUE(figures.collectives[1].later.empty());
  const auto findings = judge_run(set, figures);
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_THAT(findings[0].text, HasSubstr("under way on rank 0 in 60 % of the run, mostly 'all_gather'"));
  EXPECT_THAT(findings[1].text,
              HasSubstr("In 40 % of the run, rank 0 has collective operations under way that rank 1 has "
                        "not started"));
}

TEST(RunFigures, TellOperationsOfGroupsWithTheSameRanksAndNumbersApart) {
  ExampleTrace first(0), second(1);
  // Both groups have an all_reduce number 5, which both ranks start at the same time.
  for (const std::int64_t begin : {100 * kMs, 700 * kMs}) {
    first.span(SpanKind::kCollective, "all_reduce", begin, begin + 50 * kMs, {.id = 5, .part = 3});
    second.span(SpanKind::kCollective, "all_reduce", begin, begin + 50 * kMs, {.id = 5, .part = 3});
  }
  first.span(SpanKind::kUser, "rest", 0, 1000 * kMs, {});
  const auto figures = examine_run(align_traces({first.contents(), second.contents()}));
  ASSERT_EQ(figures.collectives.size(), 2u);
  EXPECT_EQ(figures.collectives[0].under_way, 100 * kMs);
  EXPECT_TRUE(figures.collectives[0].later.empty());
  EXPECT_TRUE(figures.collectives[1].later.empty());
}

/// Three callers keep a function busy whose handlers take 5 ms with a lock, one after another, or 15 ms without it.
TraceSet concurrent_handlers(bool locked) {
  ExampleTrace callee(0, 4);
  std::mt19937 random(5);
  std::int64_t free = 0;
  std::array<std::int64_t, 3> next{};
  std::uint64_t id = 1;
  for (int i = 0; i < 30; ++i) {
    for (int caller = 1; caller <= 3; ++caller) {
      std::int64_t& begin = next.at(static_cast<std::size_t>(caller) - 1);
      const std::int64_t alone = begin + 14 * kMs + static_cast<std::int64_t>(random() % (2 * kMs));
      const std::int64_t end = locked ? std::max(free, begin) + 5 * kMs : alone;
      callee.span(SpanKind::kHandler, "update", begin, end, {.id = id++, .peer = caller});
      free = begin = end;
    }
  }
  return align_traces({callee.contents()});
}

TEST(RunFigures, FindHandlersThatWaitForEachOther) {
  const TraceSet locked = concurrent_handlers(true);
  const RunFigures figures = examine_run(locked);
  ASSERT_EQ(figures.calls.serialized.size(), 1u);
  const SerializedHandlers& found = figures.calls.serialized[0];
  EXPECT_EQ(found.rank, 0);
  EXPECT_NEAR(found.at_a_time, 3, 0.1);
  EXPECT_EQ(found.interval, 5 * kMs);
  EXPECT_THAT(
      judge_run(locked, figures).at(0).text,
      HasSubstr("Handlers of 'update' on rank 0 run 3.0 at a time, but end one after another, every 5.0 ms"));
  EXPECT_TRUE(examine_run(concurrent_handlers(false)).calls.serialized.empty());
}

TEST(RunFigures, FindNothingInAnEmptyTrace) {
  ExampleTrace trace(0, 1);
  const TraceSet set = align_traces({trace.contents()});
  const RunFigures figures = examine_run(set);
  EXPECT_TRUE(judge_run(set, figures).empty());
  EXPECT_FALSE(encode_report(set, figures, 10).empty());
}

/// Names that try to leave the page's data.
TraceSet hostile_run() {
  const std::string hostile =
      "</script><script>alert(1)</script><!-- @DATA@ \xff\xe2\x80\xa8 http://example.com";
  ExampleTrace caller(0), callee(1);
  caller.span(SpanKind::kCall, hostile, 0, 5 * kMs, {.id = 1, .peer = 1, .bytes = 10});
  callee.span(SpanKind::kHandler, hostile, kMs, 4 * kMs, {.id = 1, .peer = 0, .bytes = 7});
  callee.contents().scalars.push_back({hostile, 0, 0.5, TimePoint(Duration(kMs))});
  callee.contents().scalars.push_back({hostile, 1, 0.25, TimePoint(Duration(2 * kMs))});
  callee.contents().identity.name = hostile;
  return align_traces({caller.contents(), callee.contents()});
}

TEST(ReportPage, LoadsNothingAndRunsOnlyItsOwnScript) {  // report_offline
  const TraceSet set = hostile_run();
  const std::string page = make_report_page(encode_report(set, examine_run(set), 100));
  EXPECT_THAT(page, HasSubstr("Content-Security-Policy\" content=\"default-src 'none';"));
  EXPECT_THAT(page, Not(HasSubstr("<script>")));
  EXPECT_THAT(page, Not(HasSubstr("@NONCE@")));
  std::size_t scripts = 0;
  for (std::size_t at = page.find("<script"); at != std::string::npos; at = page.find("<script", at + 1))
    ++scripts;
  EXPECT_EQ(scripts, 2u);
  for (const char* loads : {" src=", "@import", "url(http", "fetch(", "XMLHttpRequest", "innerHTML"}) {
    EXPECT_THAT(page, Not(HasSubstr(loads)));
  }
  const auto begin = page.find("id=\"data\">") + 10;
  const auto data = nlohmann::json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  EXPECT_EQ(data["calls"]["functions"].size(), 1u);
  EXPECT_NE(make_report_page("{}"), make_report_page("{}")) << "the nonce can be guessed";
}

TEST(ReportPage, DrawsTheLongestSpansOnly) {
  ExampleTrace trace(0, 1);
  for (int i = 1; i <= 50; ++i) trace.span(SpanKind::kUser, "x", i * 100, i * 100 + i);
  const TraceSet set = align_traces({trace.contents()});
  const auto data = nlohmann::json::parse(encode_report(set, examine_run(set), 10));
  EXPECT_EQ(data["timeline"]["workers"][0]["tracks"][0]["begins"].size(), 10u);
  EXPECT_EQ(data["timeline"]["shortest"], 41);
}

TEST(ReportPage, ShowsTheFiguresInABrowser) {
  if (!has_browser()) GTEST_SKIP() << "there is no chromium";
  const TraceSet set = late_rank(50);
  const RunFigures figures = examine_run(set);
  const Browsed late = browse(make_report_page(encode_report(set, figures, 1000)));
  EXPECT_THAT(late.console, Not(HasSubstr("CONSOLE")));
  EXPECT_THAT(late.page, HasSubstr(judge_run(set, figures)[0].text));
  EXPECT_THAT(late.page, HasSubstr("<b>50</b><span>steps</span>"));
  EXPECT_THAT(late.page, HasSubstr("bucket 3"));
  EXPECT_THAT(late.page, HasSubstr("4.0 KiB"));
  const TraceSet hostile = hostile_run();
  const Browsed other = browse(make_report_page(encode_report(hostile, examine_run(hostile), 1000)));
  EXPECT_THAT(other.console, Not(HasSubstr("CONSOLE")));
  EXPECT_THAT(other.page, HasSubstr("&lt;/script&gt;&lt;script&gt;alert(1)"));
  EXPECT_THAT(other.page, HasSubstr("<td>5.0 ms</td>"));
}

}  // namespace
}  // namespace torchspan::launch::report_test
