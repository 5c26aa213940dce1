#include "launch/watch/worker_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/listed_wait.h"
#include "launch/display/lines.h"

namespace torchspan::launch {
namespace {

using nlohmann::json;

/// A field, or the default if it is missing or has another type.
template <class T>
T field(const json& object, const char* name, T otherwise = {}) {
  const auto found = object.find(name);
  if (found == object.end()) return otherwise;
  if constexpr (std::is_same_v<T, std::string>) {
    return found->is_string() ? without_controls(found->get<T>()) : otherwise;
  }
  if constexpr (std::is_same_v<T, bool>) return found->is_boolean() ? found->get<T>() : otherwise;
  if constexpr (std::is_floating_point_v<T>) return found->is_number() ? found->get<T>() : otherwise;
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    if (found->is_number_unsigned()) {
      const auto number = found->get<std::uint64_t>();
      return std::in_range<T>(number) ? static_cast<T>(number) : otherwise;
    }
    if (!found->is_number_integer()) return otherwise;
    const auto number = found->get<std::int64_t>();
    return std::in_range<T>(number) ? static_cast<T>(number) : otherwise;
  }
}

json list(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_array() ? *found : json::array();
}

std::vector<WorkerReport::Call> decode_calls(const json& calls, const char* peer) {
  std::vector<WorkerReport::Call> decoded;
  for (const json& call : calls) {
    if (!call.is_object()) continue;
    decoded.push_back({field<std::string>(call, "call"), field<std::string>(call, peer),
                       field<std::string>(call, "site"), field<double>(call, "seconds"),
                       field<bool>(call, "begun", true)});
  }
  return decoded;
}

std::vector<WorkerReport::Pass> decode_passes(const json& passes) {
  std::vector<WorkerReport::Pass> decoded;
  for (const json& pass : passes) {
    if (!pass.is_object()) continue;
    decoded.push_back({field<std::uint64_t>(pass, "id"), field<bool>(pass, "busy"), {}});
    for (const json& line : list(pass, "waits")) {
      if (line.is_string()) decoded.back().waits.push_back(without_controls(line.get<std::string>()));
    }
  }
  return decoded;
}

std::vector<WorkerReport::Operation> decode_operations(const json& operations) {
  std::vector<WorkerReport::Operation> decoded;
  for (const json& operation : operations) {
    if (!operation.is_object()) continue;
    decoded.push_back({field<std::string>(operation, "kind"), field<std::string>(operation, "name"),
                       field<double>(operation, "seconds"), field<std::uint64_t>(operation, "id"),
                       field<int>(operation, "part", -1), field<int>(operation, "peer", -1)});
  }
  return decoded;
}

}  // namespace

bool is_future_wait(const WorkerReport::Operation& operation) {
  return operation.kind == "wait" && operation.name == kFutureWait;
}

bool is_of_group(const WorkerReport& worker, const WorkerReport::Operation& operation) {
  if (operation.kind == "collective") return true;
  if (operation.kind != "wait" || is_future_wait(operation)) return false;
  const auto is_announced = [&](const WorkerReport::Operation& other) {
    return other.kind == "wait" && other.part == operation.part && other.name != operation.name;
  };
  return operation.part < 0 || !operation.name.starts_with("all_gather(Byte [") ||
         std::ranges::none_of(worker.open, is_announced);
}

WorkerReport decode_worker_report(std::string_view text) {
  const json state = json::parse(text, nullptr, false);
  if (!state.is_object() || !state.contains("rank")) throw_invalid("a worker's answer is not its state");
  WorkerReport report;
  report.rank = field<int>(state, "rank");
  report.name = field<std::string>(state, "worker");
  report.host = field<std::string>(state, "host");
  report.process = field<std::int64_t>(state, "process");
  report.seconds = field<double>(state, "seconds");
  report.processor_seconds = field<double>(state, "processor_seconds");
  report.resident_bytes = field<std::uint64_t>(state, "resident_bytes");
  constexpr int kMostWorkers = 1 << 20;
  report.rank = std::clamp(report.rank, 0, kMostWorkers);
  report.world = std::clamp(field<int>(state, "world"), 0, kMostWorkers);
  report.open = decode_operations(list(state, "open"));
  report.ended = decode_operations(list(state, "ended"));
  for (const json& part : list(state, "traffic")) {
    const int from = part.is_object() ? field<int>(part, "from", -1) : -1;
    if (from >= 0 && from < kMostWorkers) report.received[from] = field<std::uint64_t>(part, "bytes");
  }
  for (const json& thread : list(state, "threads")) {
    const std::string name = thread.is_object() ? field<std::string>(thread, "state") : "";
    if (!name.empty()) ++report.threads[name[0]];
  }
  const auto calls = state.find("calls");
  if (calls == state.end() || !calls->is_object()) return report;
  report.pending = decode_calls(list(*calls, "pending"), "to");
  report.serving = decode_calls(list(*calls, "serving"), "from");
  report.passes = decode_passes(list(*calls, "passes"));
  report.calls_sent = field<std::uint64_t>(*calls, "sent");
  report.queued = field<std::uint64_t>(*calls, "queued");
  const auto references = calls->find("references");
  if (references != calls->end() && references->is_object()) {
    report.references = field<std::uint64_t>(*references, "owned");
  }
  return report;
}

}  // namespace torchspan::launch
