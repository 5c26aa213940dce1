// Every figure of a page is compared with the trace, from which it is computed here in another way.
#include "launch/report/report_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/api/span_kinds.h"
#include "launch/report/browser.h"
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

/// Forwards of 1, 2 and 3 ms with an autograd node each, which runs 4 ms.
void add_modules(ExampleTrace& trace) {
  for (std::uint64_t i = 1; i <= 3; ++i) {
    const std::int64_t at = static_cast<std::int64_t>(6000 + 20 * i) * kMs,
                       length = static_cast<std::int64_t>(i) * kMs;
    trace.span(kModuleSpan, "net.head", at, at + length, {.id = i, .peer = 0, .part = 1, .bytes = 1});
    trace.span(kOperatorSpan, "node", at + 10 * kMs, at + 14 * kMs, {.id = i, .part = 1});
  }
}

/// A run with calls, a pipeline, modules, steps, a curve and memory.
TraceSet run_of_everything() {
  ExampleTrace first(0), second(1);
  add_calls(first, second);
  add_pipeline(first, second);
  add_modules(second);
  for (int step = 1; step <= 5; ++step) {
    first.span(SpanKind::kUser, "step", step * 1000 * kMs, (step * 1000 + (step == 3 ? 700 : 100)) * kMs,
               {.id = static_cast<std::uint64_t>(step)});
    first.contents().scalars.push_back({"loss", step, 1.0 / step, TimePoint(Duration(step * 1000 * kMs))});
    first.contents().counters.push_back({step * 1000 * kMs, {{"process.resident_bytes", 64u << 20}}});
  }
  return align_traces({first.contents(), second.contents()});
}

TEST(ReportPage, ShowsWhatTheTraceSays) {
  if (!has_browser()) GTEST_SKIP() << "there is no chromium";
  const TraceSet set = run_of_everything();
  const Browsed shown = browse(make_report_page(encode_report(set, examine_run(set), 10000)));
  EXPECT_THAT(shown.console, Not(HasSubstr("CONSOLE")));
  // Functions: calls, p50, p99, longest, sum; p50 and p99 of the handlers.
  EXPECT_THAT(shown.page,
              HasSubstr("<td>100</td><td>50.0 ms</td><td>99.0 ms</td><td>100.0 ms</td><td>5.05 s</td>"
                        "<td>25.0 ms</td><td>49.5 ms</td>"));
  EXPECT_THAT(shown.page, HasSubstr("net.head</td><td>3</td><td>2.0 ms</td><td>6.0 ms</td>"
                                    "<td>3</td><td>4.0 ms</td><td>12.0 ms</td>"));
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

/// Presses keys on the timeline and looks at what they change; and whether every control has a name and can be reached
/// with the tabulator key.
constexpr const char* kPressKeys = R"(
const canvas = document.querySelector('#timeline canvas'), detail = document.getElementById('detail');
const press = (key, more) => canvas.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true, ...more }));
const drawn = () => canvas.toDataURL(), result = { unused: press('x'), browsers: press('+', { ctrlKey: true }) };
canvas.focus();
result.focus = document.activeElement === canvas;
result.details = ['n', 'n', 'p', 'Escape'].map((key) => (press(key), detail.textContent));
press('0');
const all = drawn();
result.changes = {};
for (const key of ['+', '-', 'ArrowRight', 'ArrowLeft', 'd', 'a', 'w', 's']) {
  press('0');
  press('+');  // at its edges, the whole view does not move
  const before = drawn();
  result.changes[key] = !press(key) && drawn() !== before;
}
press('0');
result.restored = drawn() === all;
const controls = [...document.querySelectorAll('a, button, canvas[tabindex]')];
result.controls = controls.length;
result.unreachable = controls.filter((one) => one.tabIndex < 0 || !(one.getAttribute('aria-label') || one.textContent).trim()).length;
canvas.blur();
[...document.querySelectorAll('#steps button')][0].click();
result.shown = document.activeElement === canvas && drawn() !== all;
probe(result);
)";

TEST(ReportPage, IsUsableByKeyboard) {
  if (!has_browser()) GTEST_SKIP() << "there is no chromium";
  const TraceSet set = run_of_everything();
  const Browsed shown =
      browse(with_script(make_report_page(encode_report(set, examine_run(set), 10000)), kPressKeys));
  EXPECT_THAT(shown.console, Not(HasSubstr("CONSOLE")));
  const auto result = nlohmann::json::parse(probed(shown), nullptr, false);
  ASSERT_TRUE(result.is_object()) << probed(shown);
  EXPECT_EQ(result["focus"], true);
  EXPECT_EQ(result["unused"], true) << "keys without a meaning are left to the browser";
  EXPECT_EQ(result["browsers"], true) << "Ctrl + zooms the page";
  const auto details = result["details"].get<std::vector<std::string>>();
  ASSERT_EQ(details.size(), 4u);
  EXPECT_THAT(details[0], HasSubstr("id "));
  EXPECT_NE(details[1], details[0]) << "N selects the next span";
  EXPECT_EQ(details[2], details[0]) << "P selects the previous span";
  EXPECT_EQ(details[3], "") << "Escape selects none";
  for (const auto& [key, changed] : result["changes"].items()) EXPECT_EQ(changed, true) << key;
  EXPECT_EQ(result["changes"].size(), 8u);
  EXPECT_EQ(result["restored"], true) << "0 shows everything";
  EXPECT_GT(result["controls"], 10);
  EXPECT_EQ(result["unreachable"], 0);
  EXPECT_EQ(result["shown"], true) << "a button of the slowest steps shows its step in the timeline";
}

/// The smallest contrast of a text with its background, by the formula of WCAG 2, and what the timeline is drawn on.
constexpr const char* kLookAtColors = R"(
const parse = (color) => (color.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
const blend = (top, below) => [0, 1, 2].map((i) => top[i] * (top[3] ?? 1) + below[i] * (1 - (top[3] ?? 1)));
function background(node) {
  if (!node) return [255, 255, 255];
  const color = parse(getComputedStyle(node).backgroundColor);
  return (color[3] ?? 1) === 1 ? color : blend(color, background(node.parentElement));
}
const channel = (value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
const luminance = (color) => 0.2126 * channel(color[0]) + 0.7152 * channel(color[1]) + 0.0722 * channel(color[2]);
function contrast(node) {
  const below = background(node), text = luminance(blend(parse(getComputedStyle(node).color), below)), back = luminance(below);
  return (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
}
const texts = [...document.querySelectorAll('body *')].filter((node) => node.offsetParent && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()));
const worst = texts.reduce((least, node) => (contrast(node) < contrast(least) ? node : least));
const canvas = document.querySelector('#timeline canvas');
probe({ dark: matchMedia('(prefers-color-scheme: dark)').matches, texts: texts.length, contrast: contrast(worst), where: worst.textContent.slice(0, 60),
  page: luminance(background(document.body)), timeline: luminance(canvas.getContext('2d').getImageData(2, 2, 1, 1).data) });
)";

TEST(ReportPage, IsReadableInLightAndDarkColors) {
  if (!has_browser()) GTEST_SKIP() << "there is no chromium";
  const TraceSet set = run_of_everything();
  const std::string page =
      with_script(make_report_page(encode_report(set, examine_run(set), 10000)), kLookAtColors);
  for (const ColorScheme scheme : {ColorScheme::kLight, ColorScheme::kDark}) {
    const bool is_dark = scheme == ColorScheme::kDark;
    SCOPED_TRACE(is_dark ? "dark" : "light");
    const Browsed shown = browse(page, scheme);
    EXPECT_THAT(shown.console, Not(HasSubstr("CONSOLE")));
    const auto result = nlohmann::json::parse(probed(shown), nullptr, false);
    ASSERT_TRUE(result.is_object()) << probed(shown);
    ASSERT_EQ(result["dark"], is_dark) << "the browser does not follow --blink-settings";
    EXPECT_GT(result["texts"], 50);
    EXPECT_GE(result["contrast"], 4.5) << "of '" << result["where"] << "'; WCAG 2, level AA";
    for (const char* part : {"page", "timeline"}) {
      if (is_dark) {
        EXPECT_LT(result[part], 0.05) << part;
      } else {
        EXPECT_GT(result[part], 0.8) << part;
      }
    }
  }
}

}  // namespace
}  // namespace torchspan::launch::report_page_test
