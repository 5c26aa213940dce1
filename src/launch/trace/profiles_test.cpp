#include "launch/trace/profiles.h"

#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/trace/chrome_format.h"
#include "launch/trace/chrome_json.h"
#include "launch/trace/example_traces.h"

namespace torchspan::launch::profiles_test {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kUnix = 1'700'000'000 * kSecond;  ///< of ExampleTrace when its clock is 0

NamedProfile profile_of(std::int64_t process, std::int64_t begin, std::int64_t end,
                        const std::string& file = "profile.json") {
  NamedProfile profile{file, {}};
  profile.trace.names = {"aten::linear"};
  profile.trace.categories = {"cpu_op"};
  profile.trace.rows = {"profiler: thread 1"};
  profile.trace.processes = {process};
  profile.trace.events = {{begin, end, 0, 0, 0, R"("External id":1)"}};
  return profile;
}

TraceSet attached(std::vector<TraceContents> traces, std::vector<NamedProfile> profiles) {
  TraceSet set = align_traces(std::move(traces));
  attach_profiles({std::move(profiles), {}}, set);
  return set;
}

TEST(Profiles, AreOnTheClockOfTheirWorker) {
  ExampleTrace first(0), second(1);
  second.contents().identity.began = 3 * kSecond;  // this process began later
  second.contents().identity.unix_began = kUnix + 3 * kSecond;
  first.span(SpanKind::kUser, "a", kSecond, 9 * kSecond);
  second.span(SpanKind::kUser, "b", 5 * kSecond, 6 * kSecond);
  const TraceSet set = attached({first.contents(), second.contents()},
                                {profile_of(101, kUnix + 5 * kSecond, kUnix + 6 * kSecond)});
  EXPECT_THAT(set.notes, IsEmpty());
  EXPECT_THAT(set.workers[0].profiles, IsEmpty());
  ASSERT_EQ(set.workers[1].profiles.size(), 1u);
  const ProfilerEvent& event = set.workers[1].profiles[0].events[0];
  EXPECT_EQ(event.begin, set.workers[1].contents.spans[0].begin);
  EXPECT_EQ(event.end, set.workers[1].contents.spans[0].end);
}

TEST(Profiles, OfAnotherHostFollowItsCalendarAndItsClock) {
  constexpr std::int64_t kAhead = 11'560'000'000, kCalendarAhead = -7 * kSecond;
  ExampleTrace here(0), there(1);
  there.clock("far", "other clock");
  there.contents().identity.began = kAhead;
  there.contents().identity.unix_began = kUnix + kCalendarAhead;
  const auto at = [](std::int64_t time) { return TimePoint(Duration(time)); };
  for (std::int64_t i = 0; i < 20; ++i) {
    const std::int64_t sent = i * kSecond / 2;
    here.contents().clock_samples.push_back(
        {1, at(sent), at(sent + 20'000 + kAhead), at(sent + 30'000 + kAhead), at(sent + 50'000)});
  }
  here.span(SpanKind::kUser, "a", kSecond, 9 * kSecond);
  there.span(SpanKind::kUser, "b", 5 * kSecond + kAhead, 6 * kSecond + kAhead);
  const TraceSet set =
      attached({here.contents(), there.contents()},
               {profile_of(101, kUnix + kCalendarAhead + 5 * kSecond, kUnix + kCalendarAhead + 6 * kSecond)});
  ASSERT_EQ(set.workers[1].profiles.size(), 1u);
  const ProfilerEvent& event = set.workers[1].profiles[0].events[0];
  EXPECT_EQ(event.begin, set.workers[1].contents.spans[0].begin);
  EXPECT_NEAR(static_cast<double>(event.begin), 4e9, 1);
}

TEST(Profiles, MayBeginBeforeTheFirstSpan) {
  ExampleTrace trace(0, 1);
  trace.span(SpanKind::kUser, "a", 5 * kSecond, 9 * kSecond);
  const TraceSet set =
      attached({trace.contents()}, {profile_of(100, kUnix + 3 * kSecond, kUnix + 4 * kSecond)});
  EXPECT_EQ(set.workers[0].profiles.at(0).events[0].begin, 0);
  EXPECT_EQ(set.workers[0].contents.spans[0].begin, 2 * kSecond);
  EXPECT_EQ(set.length, 6 * kSecond);
  EXPECT_EQ(set.unix_base, kUnix + 3 * kSecond);
}

TEST(Profiles, OfOtherProcessesAndTimesAreLeftOutWithANote) {
  ExampleTrace trace(0, 1);
  trace.span(SpanKind::kUser, "a", 5 * kSecond, 9 * kSecond);
  const TraceSet set = attached({trace.contents()},
                                {profile_of(99, kUnix + 5 * kSecond, kUnix + 6 * kSecond, "other.json"),
                                 profile_of(100, kUnix - 900 * kSecond, kUnix - 800 * kSecond, "early.json"),
                                 profile_of(100, 5, 6, "relative.json")});
  EXPECT_THAT(set.workers[0].profiles, IsEmpty());
  EXPECT_THAT(set.notes, ElementsAre(HasSubstr("'other.json' is left out: none of its processes"),
                                     HasSubstr("'early.json' is left out: it was not recorded during"),
                                     HasSubstr("'relative.json' is left out: it was not recorded during")));
}

TEST(Profiles, OfHostsWithEqualProcessIdsAreToldApartByRank) {
  ExampleTrace first(0), second(1);
  first.span(SpanKind::kUser, "a", 5 * kSecond, 9 * kSecond);
  second.span(SpanKind::kUser, "b", 5 * kSecond, 9 * kSecond);
  first.contents().identity.process = second.contents().identity.process = 4711;
  const auto profile = [](const std::string& file) {
    return profile_of(4711, kUnix + 5 * kSecond, kUnix + 6 * kSecond, file);
  };
  NamedProfile stated = profile("a.json");
  stated.trace.rank = 0;
  const TraceSet set =
      attached({first.contents(), second.contents()}, {stated, profile("profile.1.json"), profile("b.json")});
  EXPECT_EQ(set.workers[0].profiles.size(), 1u);
  EXPECT_EQ(set.workers[1].profiles.size(), 1u);
  EXPECT_THAT(set.notes, ElementsAre(HasSubstr("'b.json' is left out: workers of several hosts")));
}

json merged(const TraceSet& set, std::uint64_t most, ChromeJsonReport& report) {
  std::ostringstream out;
  report = write_chrome_json(set, out, most);
  const json document = json::parse(out.str());
  EXPECT_THAT(ChromeFormat(document).faults(), IsEmpty());
  return document;
}

TEST(Profiles, AreRowsOfTheirRank) {
  ExampleTrace trace(0, 1);
  trace.span(SpanKind::kUser, "a", 5 * kSecond, 9 * kSecond, {}, true);
  NamedProfile profile = profile_of(100, kUnix + 5 * kSecond, kUnix + 6 * kSecond);
  profile.trace.names.push_back("\"</script>\xff");
  profile.trace.rows.push_back("profiler: stream 7");
  const auto add = [&](std::int64_t begin, std::int64_t end, std::uint32_t row) {
    profile.trace.events.push_back({kUnix + begin, kUnix + end, 1, 0, row, ""});
  };
  add(5 * kSecond, 5 * kSecond + 10, 0);      // inside the first one
  add(6 * kSecond - 5, 6 * kSecond + 10, 0);  // overlaps it in part
  add(7 * kSecond, 7 * kSecond + 100, 1);
  profile.trace.arrows = {{{0, kUnix + 5 * kSecond}, {1, kUnix + 7 * kSecond}},
                          {{0, kUnix + 5 * kSecond + 3}, {1, kUnix + 7 * kSecond}}};  // begins at no event
  const TraceSet set = attached({trace.contents()}, {profile});
  ChromeJsonReport report;
  json document = merged(set, 1000, report);
  EXPECT_EQ(report.spans, 1u);
  EXPECT_EQ(report.profiler_events, 4u);
  EXPECT_EQ(report.arrows, 1u);
  int found = 0;
  for (const json& event : document["traceEvents"]) {
    if (event["ph"] != "X" || event["name"] != "aten::linear") continue;
    ++found;
    EXPECT_EQ(event["pid"], 0);
    EXPECT_EQ(event["ts"], 0.0);
    EXPECT_EQ(event["dur"], 1e6);
    EXPECT_EQ(event["cat"], "cpu_op");
    EXPECT_EQ(event["args"]["External id"], 1);
  }
  EXPECT_EQ(found, 1);
  document = merged(set, 2, report);
  EXPECT_EQ(report.spans + report.profiler_events, 2u);
  EXPECT_EQ(report.left_out, 3u);
}

TEST(Profiles, AreReadFromTheFolderOfTheTraces) {
  std::string name = (std::filesystem::temp_directory_path() / "torchspan_profilesXXXXXX").string();
  const std::string folder = mkdtemp(name.data());
  const auto write = [&](const std::string& file, const std::string& text) {
    std::ofstream(folder + "/" + file) << text;
  };
  write("good.json", R"({"traceEvents": [{"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 1, "dur": 7}]})");
  write("settings.json", R"({"lr": 0.1})");
  write("cut.json", R"({"traceEvents": [{"ph": "X")");
  write("packed.json.gz", "\x1f\x8b");
  write("notes.txt", "x");
  const ProfileFiles files = read_profiles(folder);
  std::filesystem::remove_all(folder);
  ASSERT_EQ(files.profiles.size(), 1u);
  EXPECT_EQ(files.profiles[0].file, "good.json");
  EXPECT_THAT(files.notes,
              ::testing::UnorderedElementsAre(HasSubstr("'cut.json' is left out: this is not JSON"),
                                              HasSubstr("'packed.json.gz' is not read: unpack it")));
}

}  // namespace
}  // namespace torchspan::launch::profiles_test
