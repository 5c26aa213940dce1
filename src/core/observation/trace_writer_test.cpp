#include "core/observation/trace_writer.h"

#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <unistd.h>

#include "core/api/observation.h"
#include "core/api/sim_executor.h"

namespace torchspan::trace_writer_test {
namespace {

using namespace std::chrono_literals;

/// A folder that the destructor removes.
struct Folder {
  Folder() { path = mkdtemp(name.data()); }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string name = (std::filesystem::temp_directory_path() / "torchspan_traceXXXXXX").string();
  std::string path;
};

/// The only file of a folder.
Bytes read_file(const std::string& folder) {
  std::ifstream file(std::filesystem::directory_iterator(folder)->path(), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

TraceIdentity worker(Executor& executor) { return identify(executor, "worker1", 1, 2); }

TEST(TraceWriter, KeepsTheFileOfAnEarlierWorkerOfTheSameNameAndProcess) {
  SimExecutor executor(1);
  executor.run([&] {
    const Folder folder;
    Runtime runtime(executor, "worker1");
    for (int i = 0; i < 3; ++i) TraceWriter(runtime, folder.path, worker(executor), 100).end();
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path)) {
      EXPECT_EQ(entry.path().extension(), ".trace");
      EXPECT_GT(std::filesystem::file_size(entry.path()), 0u);
      ++files;
    }
    EXPECT_EQ(files, 3);
  });
}

TEST(TraceWriter, WritesAllThatWasRecorded) {
  SimExecutor executor(1);
  executor.run([&] {
    const Folder folder;
    Runtime runtime(executor, "worker1");
    TraceWriter writer(runtime, folder.path + "/new", worker(executor), 100);
    runtime.metrics.counter("calls").add(5);
    executor.sleep(1ms);
    {
      SpanScope scope(runtime.spans, SpanKind::kAutograd, "backward", {.id = 1ull << 63, .part = 3});
      executor.sleep(123456789ns);
    }
    runtime.spans.record(SpanKind::kCall, "a \"name\"\n\xff", executor.now() - 7ns,
                         {.id = 9, .peer = 0, .bytes = 1ull << 40});
    EXPECT_EQ(writer.write_new(), 2u);
    EXPECT_EQ(writer.write_new(), 0u);
    runtime.scalars.add("loss", 0.25, 17, executor.now());
    runtime.clock_samples.add({0, TimePoint(1ns), TimePoint(2ns), TimePoint(3ns), TimePoint(4ns)});
    runtime.spans.record(SpanKind::kCall, "later", executor.now(), 10);
    writer.end();
    const TraceContents trace = decode_trace(read_file(folder.path + "/new"));
    EXPECT_EQ(trace.identity.rank, 1);
    EXPECT_EQ(trace.identity.world_size, 2);
    EXPECT_EQ(trace.identity.clock, clock_identity());
    EXPECT_TRUE(trace.complete);
    EXPECT_EQ(trace.lost, 0u);
    EXPECT_EQ(trace.ignored, 0u);
    ASSERT_EQ(trace.spans.size(), 3u);
    const StoredSpan& backward = trace.spans[0];
    EXPECT_EQ(trace.names.at(backward.name), "backward");
    EXPECT_EQ(backward.end - backward.begin, 123456789);
    EXPECT_EQ(backward.link.id, 1ull << 63);
    EXPECT_EQ(backward.link.part, 3);
    EXPECT_EQ(backward.link.peer, -1);
    EXPECT_TRUE(backward.nested);
    const StoredSpan& call = trace.spans[1];
    EXPECT_EQ(trace.names.at(call.name), "a \"name\"\n\xff");
    EXPECT_EQ(call.kind, SpanKind::kCall);
    EXPECT_EQ(call.link.bytes, 1ull << 40);
    EXPECT_FALSE(call.nested);
    EXPECT_EQ(trace.names.at(trace.spans[2].name), "later");
    ASSERT_EQ(trace.scalars.size(), 1u);
    EXPECT_EQ(trace.scalars[0].step, 17);
    EXPECT_EQ(trace.scalars[0].value, 0.25);
    ASSERT_EQ(trace.clock_samples.size(), 1u);
    EXPECT_EQ(trace.clock_samples[0].arrived, TimePoint(4ns));
    EXPECT_EQ(trace.counters.at(0).values.at("calls"), 5u);
    EXPECT_GT(trace.counters.at(0).values.at("process.resident_bytes"), 1u << 20);
  });
}

TEST(TraceWriter, CountsTheSpansAboveItsLimit) {
  const auto executor = make_executor();
  const Folder folder;
  Runtime runtime(*executor, "worker1");
  TraceWriter writer(runtime, folder.path, worker(*executor), 10);
  for (int i = 0; i < 7; ++i) runtime.spans.record(SpanKind::kUser, "x", executor->now());
  EXPECT_EQ(writer.write_new(), 7u);
  for (int i = 0; i < 7; ++i) runtime.spans.record(SpanKind::kUser, "x", executor->now());
  writer.end();
  const TraceContents trace = decode_trace(read_file(folder.path));
  EXPECT_EQ(trace.spans.size(), 10u);
  EXPECT_EQ(trace.lost, 4u);
}

TEST(TraceWriter, TakesSamplesLessOftenInALongRun) {
  SimExecutor executor(1);
  executor.run([&] {
    const Folder folder;
    Runtime runtime(executor, "worker1");
    TraceWriter writer(runtime, folder.path, worker(executor), 100);
    for (Duration time{}; time < 10 * 24h; time += 30s) {
      runtime.clock_samples.add({0, TimePoint(time), TimePoint(time), TimePoint(time), TimePoint(time)});
      static_cast<void>(writer.write_new());
      if (time == 2h) {
        const TraceContents early = decode_trace(read_file(folder.path));
        EXPECT_EQ(early.counters.size(), 241u);
        EXPECT_EQ(early.clock_samples.size(), 241u);
      }
      executor.sleep(30s);
    }
    runtime.clock_samples.add({1, TimePoint(1ns), TimePoint(2ns), TimePoint(3ns), TimePoint(4ns)});
    static_cast<void>(writer.write_new());
    EXPECT_EQ(decode_trace(read_file(folder.path)).clock_samples.back().rank, 1)
        << "the first sample of a new worker does not wait";
    const std::size_t counted = decode_trace(read_file(folder.path)).counters.size();
    writer.end();
    const TraceContents trace = decode_trace(read_file(folder.path));
    EXPECT_EQ(trace.counters.size(), counted + 1) << "the last values of a run are recorded";
    EXPECT_LT(trace.counters.size(), 15'000u) << "of 28,800";
    EXPECT_GT(trace.counters.size(), 5'000u);
    EXPECT_LT(trace.clock_samples.size(), 15'000u);
    EXPECT_GT(trace.clock_samples.size(), 5'000u);
  });
}

TEST(TraceWriter, LeavesAReadableFileWhereverTheWorkerIsKilled) {
  const auto executor = make_executor();
  const Folder folder;
  Runtime runtime(*executor, "worker1");
  TraceWriter writer(runtime, folder.path, worker(*executor), 100);
  for (std::uint64_t round = 0; round < 5; ++round) {
    runtime.spans.record(SpanKind::kUser, "x" + std::to_string(round), executor->now(), round);
    writer.write_new();
  }
  const Bytes whole = read_file(folder.path);
  std::size_t most = 0;
  for (std::size_t size = 0; size <= whole.size(); ++size) {
    try {
      const TraceContents trace = decode_trace(BytesView(whole).first(size));
      EXPECT_FALSE(trace.complete);
      EXPECT_GE(trace.spans.size(), most) << "a longer file has fewer spans";
      most = trace.spans.size();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_EQ(most, 0u) << "a file with spans is refused";
    }
  }
  EXPECT_EQ(most, 5u);
  Bytes damaged = whole;
  damaged[whole.size() / 2] ^= std::byte{1};
  const TraceContents trace = decode_trace(damaged);
  EXPECT_LT(trace.spans.size(), 5u);
  EXPECT_GT(trace.ignored, 0u);
}

TEST(TraceWriter, SaysWhichFileCannotBeCreated) {
  const auto executor = make_executor();
  Runtime runtime(*executor, "worker1");
  try {
    TraceWriter writer(runtime, "/proc/no", worker(*executor), 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("/proc/no/worker1.0."), std::string::npos) << error.message();
  }
}

TEST(Observation, CompletesTheFileWhenItEnds) {
  const auto executor = std::shared_ptr<Executor>(make_executor());
  const Folder folder;
  const auto runtime = std::make_shared<Runtime>(*executor, "worker1");
  {
    Observation observation(runtime, {.trace_folder = folder.path}, worker(*executor));
    EXPECT_TRUE(runtime->spans.is_traced());
    runtime->spans.record(SpanKind::kUser, "last", executor->now());
  }
  const TraceContents trace = decode_trace(read_file(folder.path));
  EXPECT_TRUE(trace.complete);
  ASSERT_EQ(trace.spans.size(), 1u);
}

TEST(TraceFormat, RefusesOtherFiles) {
  EXPECT_THROW(decode_trace({}), Error);
  EXPECT_THROW(decode_trace(Bytes(100, std::byte{7})), Error);
}

}  // namespace
}  // namespace torchspan::trace_writer_test
