#include "launch/trace/chrome_json.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "launch/trace/example_traces.h"

namespace torchspan::launch::chrome_json_test {
namespace {

using nlohmann::json;

json write(const TraceSet& set, std::uint64_t most = 1'000'000, ChromeJsonReport* report = nullptr) {
  std::ostringstream out;
  const ChromeJsonReport written = write_chrome_json(set, out, most);
  if (report != nullptr) *report = written;
  return json::parse(out.str());
}

/// The text of a number of the document: parsing it as a double would round it.
std::int64_t nanoseconds(const std::string& text) {
  const auto point = text.find('.');
  EXPECT_EQ(text.size() - point, 4u) << text;
  return std::stoll(text.substr(0, point)) * 1000 + std::stoll(text.substr(point + 1));
}

/// Events of one phase.
std::vector<json> events(const json& document, const std::string& phase) {
  std::vector<json> found;
  for (const json& event : document["traceEvents"]) {
    if (event["ph"] == phase) found.push_back(event);
  }
  return found;
}

std::int64_t time_of(const json& event, const char* field = "ts") {
  return std::llround(event[field].get<double>() * 1000);
}

TEST(ChromeJson, SlicesOfATrackNestAndAsyncOnesAreBalanced) {  // trace_nests
  std::random_device seeds;
  for (int trial = 0; trial < 30; ++trial) {
    const auto seed = seeds();
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const TraceSet set = align_traces({random_trace(0, random, 400), random_trace(1, random, 400)});
    const json document = write(set);
    std::map<std::pair<int, int>, std::vector<std::pair<std::int64_t, std::int64_t>>> tracks;
    for (const json& slice : events(document, "X")) {
      const std::int64_t begin = time_of(slice);
      tracks[{slice["pid"], slice["tid"]}].emplace_back(begin, begin + time_of(slice, "dur"));
    }
    std::size_t slices = 0;
    for (auto& [track, spans] : tracks) {
      std::vector<std::int64_t> open;
      slices += spans.size();
      for (const auto& [begin, end] : spans) {  // in the order of the file
        while (!open.empty() && open.back() <= begin) open.pop_back();
        if (!open.empty()) {
          EXPECT_LE(end, open.back());
        }
        open.push_back(end);
      }
    }
    std::map<std::string, int> asynchronous;
    for (const char* phase : {"b", "e"}) {
      for (const json& event : events(document, phase))
        asynchronous[event["cat"].dump() + event["id"].dump()]++;
    }
    for (const auto& [id, count] : asynchronous) EXPECT_EQ(count, 2) << id;
    EXPECT_EQ(slices + asynchronous.size(), 800u);
  }
}

TEST(ChromeJson, ShowsMoreParallelSpansThanThereAreRowsAsAsyncOnes) {
  ExampleTrace trace(0, 1);
  for (int i = 0; i < 40; ++i) trace.span(SpanKind::kCall, "f", i, 1000 + i, {.id = 5, .peer = 1});
  const json document = write(align_traces({trace.contents()}));
  EXPECT_EQ(events(document, "X").size(), 32u);
  EXPECT_EQ(events(document, "b").size(), 8u);
  EXPECT_EQ(events(document, "e").size(), 8u);
}

TEST(ChromeJson, HasArrowsBetweenActionsOfAPipelineAndFromTheLastRankOfAReduction) {
  ExampleTrace first(0), second(1);
  first.span(SpanKind::kPipeline, "0F1", 1000, 2000, {.id = 4})
      .span(SpanKind::kPipeline, "0B1", 5000, 7000, {.id = 4});  // before the end of the one before
  second.span(SpanKind::kPipeline, "1F1", 3000, 4000, {.id = 4})
      .span(SpanKind::kPipeline, "1B1", 4500, 5500, {.id = 4});
  first.span(SpanKind::kBucket, "bucket 0", 8000, 9900, {.id = 9, .part = 0});
  second.span(SpanKind::kBucket, "bucket 0", 9000, 9800, {.id = 9, .part = 0});
  ChromeJsonReport report;
  const json document = write(align_traces({first.contents(), second.contents()}), 100, &report);
  EXPECT_EQ(report.arrows, 3u);
  std::map<int, std::pair<std::int64_t, std::int64_t>> arrows;
  std::int64_t base = std::numeric_limits<std::int64_t>::max();
  for (const json& one : events(document, "X")) base = std::min(base, time_of(one) - 1000);
  for (const json& one : events(document, "s")) arrows[one["id"].get<int>()].first = time_of(one) - base;
  for (const json& one : events(document, "f")) arrows[one["id"].get<int>()].second = time_of(one) - base;
  std::set<std::pair<std::int64_t, std::int64_t>> found;
  for (const auto& [id, ends] : arrows) found.insert(ends);
  EXPECT_THAT(found,
              ::testing::ElementsAre(std::pair(1999, 3000), std::pair(5000, 5000), std::pair(9000, 9899)));
}

TEST(ChromeJson, EveryArrowHasBothEndsInsideSlices) {  // flow_pairs
  ExampleTrace caller(0), callee(1);
  caller.span(SpanKind::kCall, "f", 1000, 9000, {.id = 5, .peer = 1});
  caller.span(SpanKind::kCall, "f", 1000, 9000, {.id = 6, .peer = 1});  // no handler is known
  caller.span(SpanKind::kAutograd, "send gradients: result of f", 10000, 10500, {.id = 3, .peer = 1}, true);
  callee.span(SpanKind::kHandler, "f", 2000, 8000, {.id = 5, .peer = 0});
  callee.span(SpanKind::kHandler, "f", 2000, 8000, {.id = 5, .peer = 2});  // of another caller
  callee.span(SpanKind::kAutograd, "receive gradients: result of f", 11000, 11001, {.id = 3, .peer = 0});
  ChromeJsonReport report;
  const json document = write(align_traces({caller.contents(), callee.contents()}), 100, &report);
  const auto starts = events(document, "s"), ends = events(document, "f");
  ASSERT_EQ(starts.size(), 3u);
  ASSERT_EQ(ends.size(), 3u);
  EXPECT_EQ(report.arrows, 3u);
  std::set<int> ids;
  for (std::size_t i = 0; i < starts.size(); ++i) {
    EXPECT_TRUE(starts[i]["id"].is_number());
    EXPECT_EQ(starts[i]["id"], ends[i]["id"]);
    EXPECT_EQ(ends[i]["bp"], "e");
    ids.insert(starts[i]["id"].get<int>());
    for (const json& end : {starts[i], ends[i]}) {
      bool inside = false;
      for (const json& slice : events(document, "X")) {
        inside = inside ||
                 (slice["pid"] == end["pid"] && slice["tid"] == end["tid"] &&
                  time_of(slice) <= time_of(end) && time_of(end) < time_of(slice) + time_of(slice, "dur"));
      }
      EXPECT_TRUE(inside) << end;
    }
  }
  EXPECT_EQ(ids.size(), 3u);
}

TEST(ChromeJson, AnyNameIsValidJson) {  // hostile_names
  const std::string hostile = "\"</script>\\\n\x01\x7f\xff\xc3(\xed\xa0\x80 \xe2\x82\xac";
  ExampleTrace trace(0, 1);
  trace.span(SpanKind::kUser, hostile, 0, 10);
  trace.contents().identity.name = hostile;
  trace.contents().identity.host = hostile;
  trace.contents().threads[0] = hostile;
  trace.contents().scalars.push_back({hostile, 0, 1, TimePoint(Duration(5))});
  trace.contents().counters.push_back({5, {{hostile, 7}}});
  const json document = write(align_traces({trace.contents()}));
  const std::string name = events(document, "X").at(0)["name"];
  EXPECT_TRUE(name.starts_with("\"</script>\\\n\x01\x7f")) << name;
  EXPECT_TRUE(name.ends_with("\xe2\x82\xac")) << name;
}

TEST(ChromeJson, KeepsNanoseconds) {  // ns_exact
  constexpr std::int64_t kBegin = 7'654'321'123'456'789, kLength = 1'000'000'000'001;
  ExampleTrace trace(0, 1);
  trace.span(SpanKind::kUser, "first", 1, 2).span(SpanKind::kUser, "x", kBegin, kBegin + kLength);
  const TraceSet set = align_traces({trace.contents()});
  std::ostringstream out;
  write_chrome_json(set, out, 10);
  const std::string text = out.str();
  const auto field = [&](const std::string& name, std::size_t from) {
    const auto at = text.find(name, from) + name.size();
    return nanoseconds(text.substr(at, text.find(',', at) - at));
  };
  const std::size_t second = text.find("\"ph\":\"X\"", text.find("\"ph\":\"X\"") + 1);
  EXPECT_EQ(field("\"ts\":", second), kBegin - 1);
  EXPECT_EQ(field("\"dur\":", second), kLength);
  EXPECT_EQ(json::parse(text)["baseTimeNanoseconds"], 1'700'000'000'000'000'001);
}

TEST(ChromeJson, KeepsProcessesOfTwoHostsWithOneIdApart) {  // pid_collision
  ExampleTrace first(0), second(1);
  first.span(SpanKind::kUser, "x", 0, 10);
  second.span(SpanKind::kUser, "x", 0, 10);
  first.contents().identity.process = second.contents().identity.process = 4711;
  const json document = write(align_traces({first.contents(), second.contents()}));
  const auto slices = events(document, "X");
  EXPECT_EQ(slices.at(0)["pid"], 0);
  EXPECT_EQ(slices.at(1)["pid"], 1);
}

TEST(ChromeJson, LeavesOutTheShortestSpansAboveItsLimit) {
  ExampleTrace trace(0, 1);
  for (int i = 1; i <= 100; ++i) trace.span(SpanKind::kUser, "x", i * 1000, i * 1000 + i);
  ChromeJsonReport report;
  const json document = write(align_traces({trace.contents()}), 30, &report);
  EXPECT_EQ(events(document, "X").size(), 30u);
  EXPECT_EQ(report.spans, 30u);
  EXPECT_EQ(report.left_out, 70u);
  EXPECT_EQ(report.shortest, 71);
}

}  // namespace
}  // namespace torchspan::launch::chrome_json_test
