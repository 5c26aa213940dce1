#include "launch/trace/profiler_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sstream>

#include <torchspan/core/error.h>

namespace torchspan::launch::profiler_file_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::optional<ProfilerTrace> decode(const std::string& text) {
  std::istringstream file(text);
  return decode_profile(file);
}

ProfilerTrace decode_events(const std::string& events, const std::string& more = "") {
  return decode("{\"traceEvents\": [" + events + "]" + more + "}").value();
}

// The members and their order are those of files that LibTorch 2 saves.
constexpr const char* kFile = R"json({
  "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}],
  "distributedInfo": {"backend": "gloo", "rank": 3, "world_size": 4, "pg_config": [{"ranks": [0, 3]}]},
  "displayTimeUnit": "ms", "baseTimeNanoseconds": 1700000000000000000,
  "traceEvents": [
    {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "pid": 4711, "tid": 4712, "ts": 1234567.891, "dur": 20.5,
     "args": {"External id": 1, "Input Dims": [[3, 4], []], "Sequence number": 0}},
    {"ph": "X", "cat": "kernel", "name": "gemm<float>", "pid": 0, "tid": 7, "ts": 1234580, "dur": 4,
     "args": {"stream": 7}},
    {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler",
     "ts": 1, "dur": 2},
    {"ph": "s", "id": 9, "pid": 4711, "tid": 4712, "ts": 1234567.891, "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 9, "pid": 0, "tid": 7, "ts": 1234580, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    {"ph": "s", "id": 10, "pid": 4711, "tid": 4712, "ts": 1234567.891, "cat": "fwdbwd", "name": "fwdbwd"},
    {"name": "process_name", "ph": "M", "ts": 1, "pid": 4711, "tid": 0, "args": {"name": "train"}},
    {"name": "process_labels", "ph": "M", "ts": 1, "pid": 4711, "tid": 0, "args": {"labels": "CPU"}},
    {"name": "process_labels", "ph": "M", "ts": 1, "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    {"name": "thread_name", "ph": "M", "ts": 1, "pid": 4711, "tid": 4712, "args": {"name": "thread 4712 (train)"}},
    {"name": "thread_name", "ph": "M", "ts": 1, "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
    {"name": "Record Window End", "ph": "i", "ts": 5, "pid": "", "tid": "Trace", "s": "g"}
  ], "traceName": "x.json"})json";

TEST(ProfilerFile, HasEventsRowsArrowsAndProcesses) {
  const ProfilerTrace trace = decode(kFile).value();
  EXPECT_THAT(trace.rows, ElementsAre("profiler: thread 4712 (train)", "profiler: GPU 0 stream 7",
                                      "profiler: thread PyTorch Profiler"));
  ASSERT_EQ(trace.events.size(), 3u);
  const ProfilerEvent& linear = trace.events[0];
  EXPECT_EQ(linear.begin, 1'700'000'000'000'000'000 + 1'234'567'891);
  EXPECT_EQ(linear.end - linear.begin, 20'500);
  EXPECT_EQ(trace.names[linear.name], "aten::linear");
  EXPECT_EQ(trace.categories[linear.category], "cpu_op");
  EXPECT_THAT(linear.arguments, HasSubstr(R"("Input Dims":[[3,4],[]])"));
  ASSERT_EQ(trace.arrows.size(), 1u) << "one has no end";
  EXPECT_EQ(trace.arrows[0].from.row, linear.row);
  EXPECT_EQ(trace.arrows[0].from.at, linear.begin);
  EXPECT_EQ(trace.arrows[0].to.row, trace.events[1].row);
  EXPECT_THAT(trace.processes, ElementsAre(4711)) << "a device is no process";
  EXPECT_EQ(trace.rank, 3);
  EXPECT_EQ(trace.unusable, 0u);
}

TEST(ProfilerFile, TakesTimesSince1970AndABaseAfterTheEvents) {
  constexpr const char* kEvent =
      R"({"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 1700000000000001, "dur": 7})";
  EXPECT_EQ(decode_events(kEvent).events.at(0).begin, 1'700'000'000'000'001'000);
  EXPECT_EQ(decode_events(kEvent, R"(, "baseTimeNanoseconds": 5)").events.at(0).end,
            1'700'000'000'000'001'000 + 7'000 + 5);
}

TEST(ProfilerFile, CountsEventsThatCannotBeUsed) {
  const ProfilerTrace trace = decode_events(
      R"({"ph": "X", "name": "no time", "pid": 1, "tid": 1, "dur": 7},)"
      R"({"ph": "X", "name": "negative", "pid": 1, "tid": 1, "ts": 1, "dur": -7},)"
      R"({"ph": "X", "name": "far", "pid": 1, "tid": 1, "ts": 1e300, "dur": 7},)"
      R"({"ph": "X", "name": "text", "pid": 1, "tid": 1, "ts": "1", "dur": 7},)"
      R"({"ph": "X", "pid": 1, "tid": 1, "ts": 1, "dur": 7},)"
      R"({"ph": "X", "name": "no thread", "pid": 1, "ts": 1, "dur": 7},)"
      R"({"ph": 5}, 17, [], null, {}, {"ph": "M", "args": 3}, {"ph": "s"}, {"ph": "f", "ts": 1})");
  EXPECT_EQ(trace.unusable, 6u);
  EXPECT_THAT(trace.events, IsEmpty());
  EXPECT_THAT(trace.arrows, IsEmpty());
}

TEST(ProfilerFile, IsToldFromOtherJson) {
  EXPECT_FALSE(decode("[]"));
  EXPECT_FALSE(decode("17"));
  EXPECT_FALSE(decode(R"({"a": {"traceEvents": []}})"));
  EXPECT_FALSE(decode(R"({"traceEvents": 5})"));
  EXPECT_FALSE(decode(R"({"traceEvents": [], "otherData": {"tool": "torchspan trace"}})"));
  EXPECT_TRUE(decode(R"({"traceEvents": [], "otherData": 5})"));
  EXPECT_THROW(decode(R"({"traceEvents": [{"ph": "X")"), Error);
  EXPECT_THROW(decode(""), Error);
}

}  // namespace
}  // namespace torchspan::launch::profiler_file_test
