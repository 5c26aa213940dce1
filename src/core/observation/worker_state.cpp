#include "core/observation/worker_state.h"

#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/api/message_span.h"
#include "core/observation/process_figures.h"

namespace torchspan {
namespace {

using nlohmann::json;

constexpr std::array kStateKinds = {"call",     "handler", "autograd", "optimizer",  "bucket",
                                    "pipeline", "wait",    "user",     "collective", "checkpoint"};

std::string first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// The threads of this process as the kernel sees them: name, state, and what a sleeping one waits in.
json describe_threads() {
  json threads = json::array();
  std::error_code failure;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", failure)) {
    const std::string stat = first_line(entry.path() / "stat");
    const auto name_end = stat.rfind(')');
    const std::string state = name_end + 2 < stat.size() ? stat.substr(name_end + 2, 1) : "?";
    threads.push_back({{"id", entry.path().filename().string()},
                       {"name", first_line(entry.path() / "comm")},
                       {"state", state},
                       {"in", first_line(entry.path() / "wchan")}});
  }
  return threads;
}

std::string_view state_kind(SpanKind kind) {
  if (kind == kMessageSpan) return "message";
  const auto number = static_cast<std::size_t>(kind);
  return number < kStateKinds.size() ? kStateKinds[number] : "other";
}

json describe_open(Runtime& runtime, TimePoint now) {
  json open = json::array();
  for (const OpenOperation& operation : runtime.spans.open()) {
    open.push_back({{"kind", state_kind(operation.kind)},
                    {"name", operation.name},
                    {"seconds", to_seconds(now - operation.begin)},
                    {"id", operation.link.id},
                    {"peer", operation.link.peer},
                    {"part", operation.link.part}});
  }
  return open;
}

/// The spans that this worker's rings still hold.
std::vector<StoredSpan> stored_spans(const Runtime& runtime) {
  SpanRecorder::Cursor cursor;
  std::vector<StoredSpan> spans;
  runtime.spans.read(cursor, spans);
  return spans;
}

/// What calls and replies of the last second have brought from each rank, in bytes.
json describe_traffic(const std::vector<StoredSpan>& spans, TimePoint now) {
  const std::int64_t since = (now - std::chrono::seconds(1)).time_since_epoch().count();
  std::map<std::int32_t, std::uint64_t> received;
  for (const StoredSpan& span : spans) {
    const bool call = span.kind == SpanKind::kCall || span.kind == SpanKind::kHandler;
    if (call && span.end >= since && span.link.peer >= 0) received[span.link.peer] += span.link.bytes;
  }
  json traffic = json::array();
  for (const auto& [peer, bytes] : received) traffic.push_back({{"from", peer}, {"bytes", bytes}});
  return traffic;
}

/// The last operation of each set of ranks that this worker has ended, as far as its rings still hold one. Several groups
/// may have the same ranks, so numbers do not tell which one was last.
json describe_ended(const Runtime& runtime, const std::vector<StoredSpan>& spans, TimePoint now) {
  std::map<std::int32_t, const StoredSpan*> last;  // by group
  for (const StoredSpan& span : spans) {
    if (span.kind != SpanKind::kCollective) continue;
    const StoredSpan*& place = last[span.link.part];
    if (place == nullptr || place->end <= span.end) place = &span;
  }
  const std::vector<std::string> names = runtime.spans.names_from(0);
  json ended = json::array();
  for (const auto& [group, span] : last) {
    ended.push_back({{"kind", state_kind(span->kind)},
                     {"name", names.at(span->name)},
                     {"seconds", to_seconds(now - TimePoint(Duration(span->end)))},
                     {"id", span->link.id},
                     {"part", group}});
  }
  return ended;
}

}  // namespace

std::string describe_worker(Runtime& runtime, const TraceIdentity& identity, const std::string& calls,
                            StateDetail detail) {
  const TimePoint now = runtime.executor.now();
  json state = {{"worker", identity.name},
                {"rank", identity.rank},
                {"world", identity.world_size},
                {"host", identity.host},
                {"process", identity.process},
                {"seconds", to_seconds(now.time_since_epoch() - Duration(identity.began))},
                {"open", describe_open(runtime, now)},
                {"calls", json::parse(calls, nullptr, false)}};
  if (detail == StateDetail::kFull) {
    state["resident_bytes"] = resident_bytes();
    state["processor_seconds"] = processor_seconds();
    const std::vector<StoredSpan> spans = stored_spans(runtime);
    state["ended"] = describe_ended(runtime, spans, now);
    state["traffic"] = describe_traffic(spans, now);
    state["threads"] = describe_threads();
    state["counters"] = runtime.metrics.snapshot();
  }
  return state.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace torchspan
