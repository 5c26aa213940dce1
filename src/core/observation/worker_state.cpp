#include "core/observation/worker_state.h"

#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

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

}  // namespace

std::string describe_worker(Runtime& runtime, const TraceIdentity& identity, const std::string& calls) {
  const TimePoint now = runtime.executor.now();
  json open = json::array();
  for (const OpenOperation& operation : runtime.spans.open()) {
    const auto kind = static_cast<std::size_t>(operation.kind);
    open.push_back({{"kind", kind < kStateKinds.size() ? kStateKinds[kind] : "other"},
                    {"name", operation.name},
                    {"seconds", to_seconds(now - operation.begin)},
                    {"id", operation.link.id},
                    {"peer", operation.link.peer},
                    {"part", operation.link.part}});
  }
  const json state = {{"worker", identity.name},
                      {"rank", identity.rank},
                      {"world", identity.world_size},
                      {"host", identity.host},
                      {"process", identity.process},
                      {"seconds", to_seconds(now.time_since_epoch() - Duration(identity.began))},
                      {"resident_bytes", resident_bytes()},
                      {"processor_seconds", processor_seconds()},
                      {"open", open},
                      {"threads", describe_threads()},
                      {"counters", runtime.metrics.snapshot()},
                      {"calls", json::parse(calls, nullptr, false)}};
  return state.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace torchspan
