#include "launch/watch/host_report.h"

#include <algorithm>
#include <cctype>
#include <fmt/format.h>
#include <set>
#include <type_traits>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/json_fields.h"
#include "core/api/listed_wait.h"
#include "launch/display/lines.h"
#include "launch/watch/incident.h"

namespace torchspan::launch {
namespace {

using nlohmann::json;

/// A field, or the default if it is missing or has another type. Texts may be shown on a terminal.
template <class T>
T field(const json& object, const char* name, T otherwise = {}) {
  T value = json_field<T>(object, name).value_or(std::move(otherwise));
  if constexpr (std::is_same_v<T, std::string>) value = without_controls(value);
  return value;
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

namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostEntries = 256;    ///< of each list of a worker
constexpr std::size_t kMostReported = 4096;  ///< workers of a host
constexpr std::size_t kMostNotices = 200;
constexpr std::size_t kMostCharacters = 512;
constexpr int kMostNode = 1 << 20;

std::string shorten(const std::string& text) { return text.substr(0, kMostCharacters); }

template <class List, class Encode>
Json encode_list(const List& list, std::size_t most, const Encode& encode) {
  Json encoded = Json::array();
  for (const auto& entry : list) {
    if (encoded.size() == most) break;
    encoded.push_back(encode(entry));
  }
  return encoded;
}

Json encode_operations(const std::vector<WorkerReport::Operation>& operations) {
  return encode_list(operations, kMostEntries, [](const WorkerReport::Operation& operation) {
    return Json{{"kind", shorten(operation.kind)},
                {"name", shorten(operation.name)},
                {"seconds", operation.seconds},
                {"id", operation.id},
                {"part", operation.part}};
  });
}

Json encode_calls(const std::vector<WorkerReport::Call>& calls, const char* peer) {
  return encode_list(calls, kMostEntries, [peer](const WorkerReport::Call& call) {
    return Json{{"call", shorten(call.name)},
                {peer, shorten(call.peer)},
                {"site", shorten(call.site)},
                {"seconds", call.seconds},
                {"begun", call.begun}};
  });
}

Json encode_passes(const std::vector<WorkerReport::Pass>& passes) {
  return encode_list(passes, kMostEntries, [](const WorkerReport::Pass& pass) {
    return Json{
        {"id", pass.id},
        {"busy", pass.busy},
        {"waits", encode_list(pass.waits, kMostEntries, [](const auto& text) { return shorten(text); })}};
  });
}

/// As the worker itself answers, with what its launcher knows about the process.
Json encode_worker(const WorkerReport& worker) {
  Json threads = Json::array();
  for (const auto& [state, count] : worker.threads) {
    for (int i = 0; i < count && threads.size() < kMostEntries; ++i) {
      threads.push_back({{"state", std::string(1, state)}});
    }
  }
  Json traffic = Json::array();
  for (const auto& [from, bytes] : worker.received) {
    if (traffic.size() < kMostEntries) traffic.push_back({{"from", from}, {"bytes", bytes}});
  }
  return {{"rank", worker.rank},
          {"world", worker.world},
          {"worker", shorten(worker.name)},
          {"process", worker.process},
          {"process_state", std::string(1, worker.process_state)},
          {"answers", worker.answers},
          {"seconds", worker.seconds},
          {"processor_seconds", worker.processor_seconds},
          {"resident_bytes", worker.resident_bytes},
          {"open", encode_operations(worker.open)},
          {"ended", encode_operations(worker.ended)},
          {"threads", std::move(threads)},
          {"traffic", std::move(traffic)},
          {"calls",
           {{"pending", encode_calls(worker.pending, "to")},
            {"serving", encode_calls(worker.serving, "from")},
            {"passes", encode_passes(worker.passes)},
            {"queued", worker.queued},
            {"references", {{"owned", worker.references}}},
            {"sent", worker.calls_sent}}}};
}

Json encode_host(const HostReport& report) {
  return {{"node", report.node},
          {"host", shorten(report.host)},
          {"trouble", shorten(report.trouble)},
          {"page", report.page},
          {"written", report.written},
          {"workers", encode_list(report.workers, kMostReported, encode_worker)},
          {"notices", encode_list(report.notices, kMostNotices, [](const auto& notice) {
             return Json{{"rank", notice.first}, {"line", encode_timeout(notice.second)}};
           })}};
}

std::optional<WorkerReport> decode_worker(const Json& object) {
  JsonFields fields(object);
  fields.require("rank", 0, kMostNode);
  const auto state = fields.require<std::string>("process_state");
  const bool answers = fields.require<bool>("answers");
  if (!fields.good() || state.size() != 1) return std::nullopt;
  WorkerReport worker = decode_worker_report(object.dump(-1, ' ', false, Json::error_handler_t::replace));
  worker.process_state = std::isalpha(static_cast<unsigned char>(state.front())) != 0 ? state.front() : '?';
  worker.answers = answers;
  return worker;
}

bool decode_workers(const Json& list, HostReport& report) {
  for (const Json& object : list) {
    auto worker = decode_worker(object);
    if (!worker) return false;
    report.workers.push_back(std::move(*worker));
  }
  std::ranges::sort(report.workers, {}, &WorkerReport::rank);
  return std::ranges::adjacent_find(report.workers, {}, &WorkerReport::rank) == report.workers.end();
}

bool decode_notices(const Json& list, HostReport& report) {
  for (const Json& object : list) {
    JsonFields fields(object);
    const int rank = fields.require("rank", 0, kMostNode);
    const auto notice = decode_timeout(fields.require<std::string>("line"));
    if (!fields.good() || !notice) return false;
    report.notices.emplace_back(rank, printable(*notice));
  }
  return true;
}

std::optional<HostReport> decode_host(const Json& object) {
  JsonFields fields(object);
  HostReport report{.node = fields.require("node", 0, kMostNode),
                    .host = without_controls(fields.require<std::string>("host")),
                    .trouble = without_controls(fields.require<std::string>("trouble")),
                    .workers = {},
                    .page = without_controls(fields.require<std::string>("page"))};
  report.written = fields.require<bool>("written");
  const Json& workers = fields.require_list("workers", kMostReported);
  const Json& notices = fields.require_list("notices", kMostNotices);
  if (!fields.good() || !decode_workers(workers, report) || !decode_notices(notices, report))
    return std::nullopt;
  return report;
}

std::string text_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

/// A worker that could not be asked.
WorkerReport absent_worker(int rank, const JobReport& job, const HostReport& host) {
  WorkerReport worker;
  worker.rank = rank;
  worker.name = fmt::format("{}{}", job.prefix, rank);
  worker.node = host.node;
  worker.host = host.host;
  worker.answers = false;
  worker.trouble =
      host.trouble.empty() ? "no process to ask: it has ended, or has not joined yet" : host.trouble;
  worker.host_silent = !host.trouble.empty();
  return worker;
}

}  // namespace

std::string encode_host_report(const HostReport& report) { return text_of(encode_host(report)); }

std::optional<HostReport> decode_host_report(std::string_view text) {
  return decode_host(Json::parse(text, nullptr, false));
}

std::string encode_job_report(const JobReport& report) {
  return text_of({{"node", report.node},
                  {"host", shorten(report.host)},
                  {"workers", report.workers},
                  {"prefix", shorten(report.prefix)},
                  {"others", encode_list(report.others, kMostNode, encode_host)}});
}

std::optional<JobReport> decode_job_report(std::string_view text) {
  const Json object = Json::parse(text, nullptr, false);
  JsonFields fields(object);
  JobReport report{.node = fields.require("node", 0, kMostNode),
                   .host = without_controls(fields.require<std::string>("host")),
                   .workers = fields.require<int>("workers", 1, kMostReported),
                   .prefix = without_controls(fields.require<std::string>("prefix")),
                   .others = {}};
  const Json& others = fields.require_list("others", kMostNode);
  if (!fields.good()) return std::nullopt;
  for (const Json& other : others) {
    auto decoded = decode_host(other);
    if (!decoded) return std::nullopt;
    report.others.push_back(std::move(*decoded));
  }
  return report;
}

std::string name_of_host(int node, const std::string& host) {
  return host.empty() ? fmt::format("host {}", node) : fmt::format("host {} ({})", node, host);
}

std::vector<WorkerReport> merge_hosts(std::vector<WorkerReport> mine, const JobReport& job) {
  HostReport here{.node = job.node, .host = job.host, .trouble = "", .workers = std::move(mine)};
  std::vector<const HostReport*> hosts{&here};
  for (const HostReport& other : job.others) hosts.push_back(&other);
  std::vector<WorkerReport> all;
  std::set<int> reported;
  for (const HostReport* host : hosts) {
    for (const WorkerReport& worker : host->workers) {
      if (worker.rank / job.workers != host->node || !reported.insert(worker.rank).second) continue;
      all.push_back(worker);
      all.back().node = host->node;
      all.back().host = host->host;
      if (!worker.answers) all.back().name = fmt::format("{}{}", job.prefix, worker.rank);
    }
  }
  for (const HostReport* host : hosts) {
    for (int rank = host->node * job.workers; rank < (host->node + 1) * job.workers; ++rank) {
      if (reported.insert(rank).second) all.push_back(absent_worker(rank, job, *host));
    }
  }
  std::ranges::sort(all, {}, &WorkerReport::rank);
  return all;
}

}  // namespace torchspan::launch
