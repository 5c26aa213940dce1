// Every figure of a page is compared with the trace, from which it is computed here in another way.
#include "launch/report/report_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/report/browser.h"
#include "launch/report/report_data.h"
#include "launch/report/verdict.h"
#include "launch/trace/example_traces.h"

namespace torchspan::launch::report_page_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kMs = 1'000'000;

/// Calls of 1 to 100 ms with handlers of half their length, each with 100 bytes of arguments and 200 of results.
void add_calls(ExampleTrace& caller, ExampleTrace& callee) {
  std::int64_t at = 0;
  for (int i = 1; i <= 100; ++i) {
    const auto id = static_cast<std::uint64_t>(i);
    caller.span(SpanKind::kCall, "lookup", at, at + i * kMs, {.id = id, .peer = 1, .bytes = 200});
    callee.span(SpanKind::kHandler, "lookup", at, at + i * kMs / 2, {.id = id, .peer = 0, .bytes = 100});
    at += i * kMs;
  }
}

/// A step of 40 ms in which each of two workers is busy for 20 ms, and a wait, which is no work.
void add_pipeline(ExampleTrace& first, ExampleTrace& second) {
  const auto action = [](ExampleTrace& trace, const char* name, std::int64_t begin) {
    trace.span(SpanKind::kPipeline, name, begin * kMs, (begin + 10) * kMs, {.id = 7, .part = 0}, true);
  };
  action(first, "0F0", 0);
  first.span(SpanKind::kPipeline, "wait for gradients of micro-batch 0 at layer 0", 10 * kMs, 30 * kMs,
             {.id = 7}, true);
  action(first, "0B0", 30);
  action(second, "1F0", 10);
  action(second, "1B0", 20);
}

TEST(ReportPage, ShowsWhatTheTraceSays) {
  if (!has_browser()) GTEST_SKIP() << "there is no chromium";
  ExampleTrace first(0), second(1);
  add_calls(first, second);
  add_pipeline(first, second);
  for (int step = 1; step <= 5; ++step) {
    first.span(SpanKind::kUser, "step", step * 1000 * kMs, (step * 1000 + (step == 3 ? 700 : 100)) * kMs,
               {.id = static_cast<std::uint64_t>(step)});
    first.contents().scalars.push_back({"loss", step, 1.0 / step, TimePoint(Duration(step * 1000 * kMs))});
    first.contents().counters.push_back({step * 1000 * kMs, {{"process.resident_bytes", 64u << 20}}});
  }
  const TraceSet set = align_traces({first.contents(), second.contents()});
  const Browsed shown = browse(make_report_page(encode_report(set, examine_run(set), 10000)));
  EXPECT_THAT(shown.console, Not(HasSubstr("CONSOLE")));
  // Functions: calls, p50, p99, longest, sum; p50 and p99 of the handlers.
  EXPECT_THAT(shown.page,
              HasSubstr("<td>100</td><td>50.0 ms</td><td>99.0 ms</td><td>100.0 ms</td><td>5.05 s</td>"
                        "<td>25.0 ms</td><td>49.5 ms</td>"));
  EXPECT_THAT(shown.page, AllOf(HasSubstr("9.8 KiB in 100"), HasSubstr("19.5 KiB in 100"))) << "traffic";
  EXPECT_THAT(shown.page, AllOf(HasSubstr("workers are idle 50.0 % of the time"),
                                HasSubstr("Measured: 40.0 ms, 50.0 % idle"),
                                HasSubstr("(simulated): 40.0 ms, 50.0 % idle")));
  EXPECT_THAT(shown.page, AllOf(HasSubstr("Taken from spans named step."), HasSubstr("Values of loss"),
                                HasSubstr("Resident memory over time")));
  const auto slowest = shown.page.find("Slowest steps");
  ASSERT_NE(slowest, std::string::npos);
  EXPECT_LT(shown.page.find("700.0 ms", slowest), shown.page.find("100.0 ms", slowest)) << "slowest first";
}

}  // namespace
}  // namespace torchspan::launch::report_page_test
