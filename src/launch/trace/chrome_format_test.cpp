#include "launch/trace/chrome_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <sstream>

#include "launch/trace/chrome_json.h"
#include "launch/trace/example_traces.h"

namespace torchspan::launch::chrome_format_test {
namespace {

using nlohmann::json;
using ::testing::IsEmpty;
using ::testing::Not;

json written(const TraceSet& set) {
  std::ostringstream out;
  write_chrome_json(set, out, 1'000'000);
  return json::parse(out.str());
}

/// A call with its handler, a nested span, spans that overlap, a curve and a counter.
TraceSet example_set() {
  ExampleTrace caller(0), callee(1);
  caller.span(SpanKind::kUser, "step", 1000, 9000, {}, true);
  caller.span(SpanKind::kUser, "inner", 2000, 3000, {}, true);
  caller.span(SpanKind::kCall, "f", 1500, 8000, {.id = 5, .peer = 1});
  callee.span(SpanKind::kHandler, "f", 2000, 7000, {.id = 5, .peer = 0});
  for (int i = 0; i < 40; ++i) callee.span(SpanKind::kWait, "w", i, 5000 + i, {.id = 1});
  caller.contents().scalars.push_back({"loss", 0, 1, TimePoint(Duration(5000))});
  caller.contents().counters.push_back({6000, {{"calls", 7}}});
  return align_traces({caller.contents(), callee.contents()});
}

TEST(ChromeFormat, IsThatOfMergedTraces) {
  EXPECT_THAT(ChromeFormat(written(example_set())).faults(), IsEmpty());
  std::random_device seeds;
  for (int trial = 0; trial < 20; ++trial) {
    const auto seed = seeds();
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const TraceSet set = align_traces({random_trace(0, random, 400), random_trace(1, random, 400)});
    EXPECT_THAT(ChromeFormat(written(set)).faults(), IsEmpty());
  }
}

TEST(ChromeFormat, FindsWhatIsWrong) {
  const json good = written(example_set());
  const auto spoil = [&](const std::string& phase, const auto& change) {
    json document = good;
    for (json& event : document["traceEvents"]) {
      if (event["ph"] != phase) continue;
      change(event, document);
      break;
    }
    EXPECT_THAT(ChromeFormat(document).faults(), Not(IsEmpty())) << phase;
  };
  for (const char* phase : {"X", "b", "e", "s", "f", "M", "C"}) {
    for (const char* member : {"ph", "pid", "name"}) {
      spoil(phase, [&](json& event, json&) { event.erase(member); });
    }
    spoil(phase, [](json& event, json&) { event["pid"] = -1; });
    spoil(phase, [](json& event, json&) { event["ph"] = "?"; });
  }
  for (const char* phase : {"X", "b", "e", "s", "f", "C"}) {
    spoil(phase, [](json& event, json&) { event["ts"] = "soon"; });
  }
  for (const char* phase : {"b", "e", "s", "f"}) {
    spoil(phase, [](json& event, json&) { event["id"] = 1'000'000; });
    spoil(phase, [](json& event, json& document) { document["traceEvents"].push_back(json(event)); });
  }
  for (const char* phase : {"s", "f"}) {
    spoil(phase, [](json& event, json&) { event["ts"] = 1e9; });
    spoil(phase, [](json& event, json&) { event["tid"] = 999; });
  }
  spoil("f", [](json& event, json&) { event.erase("bp"); });
  spoil("X", [](json& event, json&) { event["dur"] = -1; });
  spoil("X", [](json& event, json&) { event["tid"] = 999; });
  spoil("X", [](json& event, json& document) {
    json other = event;
    other["ts"] = event["ts"].get<double>() + event["dur"].get<double>() / 2;
    document["traceEvents"].push_back(other);
  });
  spoil("M", [](json& event, json&) { event["args"] = json::object(); });
  spoil("M", [](json& event, json& document) { document["traceEvents"].push_back(json(event)); });
  spoil("C", [](json& event, json&) { event["args"]["value"] = "seven"; });
  EXPECT_THAT(ChromeFormat(json::array()).faults(), Not(IsEmpty()));
}

}  // namespace
}  // namespace torchspan::launch::chrome_format_test
