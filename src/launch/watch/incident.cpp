#include "launch/watch/incident.h"

#include <algorithm>
#include <fmt/format.h>
#include <string_view>
#include <utility>

#include "core/api/parse_number.h"
#include "launch/display/lines.h"
#include "launch/watch/diagnosis.h"

namespace torchspan::launch {
namespace {

void add_notice(const TimeoutNotice& notice, WorkerReport& worker) {
  if (notice.kind == "call") {
    worker.pending.push_back({notice.name, notice.peer, notice.site, notice.seconds, true});
    return;
  }
  const bool listed = std::any_of(worker.open.begin(), worker.open.end(), [&](const auto& operation) {
    return operation.kind == notice.kind && operation.part == notice.part && operation.id == notice.id;
  });
  if (!listed) worker.open.push_back({notice.kind, notice.name, notice.seconds, notice.id, notice.part});
}

void add_call(WorkerReport::Call call, std::vector<WorkerReport::Call>& calls) {
  const bool listed = std::any_of(calls.begin(), calls.end(), [&](const WorkerReport::Call& one) {
    return one.name == call.name && one.peer == call.peer;
  });
  if (!listed) calls.push_back(std::move(call));
}

/// Returns the report of `rank`; inserts one without an answer if there is none.
WorkerReport& report_of(int rank, const std::string& prefix, std::vector<WorkerReport>& workers) {
  auto found = std::ranges::lower_bound(workers, rank, {}, &WorkerReport::rank);
  if (found == workers.end() || found->rank != rank) {
    found = workers.insert(found, WorkerReport());
    found->rank = rank;
    found->answers = false;
  }
  if (!found->answers) found->name = fmt::format("{}{}", prefix, rank);
  return *found;
}

/// The process worked when the operation timed out, even if it has ended since.
void count_as_alive(WorkerReport& worker) {
  worker.answers = true;
  worker.trouble.clear();
  worker.host_silent = false;
  if (worker.process_state == 'X' || worker.process_state == 'Z') worker.process_state = '?';
}

/// Returns the index of the worker with that name, which may have no report yet; nullopt if the name has another prefix.
std::optional<std::size_t> find_worker(std::string_view name, const std::string& prefix,
                                       std::vector<WorkerReport>& workers) {
  auto found = std::ranges::find(workers, name, &WorkerReport::name);
  if (found == workers.end()) {
    if (!name.starts_with(prefix)) return std::nullopt;
    name.remove_prefix(prefix.size());
    const auto rank = parse_number<int>(name);
    if (!rank || *rank < 0) return std::nullopt;
    static_cast<void>(report_of(*rank, prefix, workers));
    found = std::ranges::find(workers, *rank, &WorkerReport::rank);
  }
  return static_cast<std::size_t>(found - workers.begin());
}

/// Adds a call whose handler on `rank` made another call, which timed out. As a consequence, it may have ended too.
void add_handler(int rank, const TimeoutNotice& notice, const std::string& prefix,
                 std::vector<WorkerReport>& workers) {
  const auto at = find_worker(notice.peer, prefix, workers);
  WorkerReport& callee = report_of(rank, prefix, workers);
  add_call({notice.name, notice.peer, "", notice.seconds, true}, callee.serving);
  if (!at) return;
  WorkerReport& caller = workers[*at];
  // A process that does not answer although it has not ended may be the cause.
  const bool gone = caller.process == 0 && !caller.host_silent;
  const bool ended = gone || caller.process_state == 'X' || caller.process_state == 'Z';
  if (!caller.answers && ended) count_as_alive(caller);
  add_call({notice.name, callee.name, "", notice.seconds, true}, caller.pending);
}

}  // namespace

TimeoutNotice printable(TimeoutNotice notice) {
  for (std::string* text : {&notice.kind, &notice.name, &notice.peer, &notice.site, &notice.detail}) {
    *text = without_controls(*text);
  }
  return notice;
}

std::string describe_notice(int rank, const TimeoutNotice& notice) {
  std::string text = fmt::format("rank {}: ", rank);
  if (notice.kind == "handler") {
    return text + fmt::format("a call timed out that the handler of '{}' made, {:.1f} s after {} called it",
                              notice.name, notice.seconds, notice.peer);
  }
  if (notice.kind == "call") {
    text += fmt::format("the call '{}' to {}", notice.name, notice.peer);
  } else {
    text += fmt::format("'{}' number {}", notice.name, notice.id);
  }
  if (!notice.site.empty()) text += fmt::format(" at {}", notice.site);
  text += fmt::format(" timed out after {:.1f} s", notice.seconds);
  return notice.detail.empty() ? text : fmt::format("{}; it waited for {}", text, notice.detail);
}

std::string Incident::headline() const {
  return notices.empty() ? "" : describe_notice(notices.front().first, notices.front().second);
}

std::string Incident::place() const {
  return page.empty() || page_host.empty() ? page : fmt::format("{} on {}", page, page_host);
}

void add_timed_out(const Incident& incident, const std::string& prefix, std::vector<WorkerReport>& workers) {
  for (const auto& [rank, notice] : incident.notices) {
    WorkerReport& worker = report_of(rank, prefix, workers);
    count_as_alive(worker);
    if (notice.kind != "handler") add_notice(notice, worker);
  }
  for (const auto& [rank, notice] : incident.notices) {
    if (notice.kind == "handler") add_handler(rank, notice, prefix, workers);
  }
}

std::string describe_incident(Incident& incident, const std::string& prefix,
                              std::vector<WorkerReport> workers, const std::vector<int>& ranks) {
  add_timed_out(incident, prefix, workers);
  std::string text;
  for (const auto& [rank, notice] : incident.notices) text += describe_notice(rank, notice) + "\n";
  const std::vector<std::string> suspects = find_suspects(workers);
  if (!suspects.empty()) incident.suspect = suspects.front();
  text += "\n" + format_diagnosis(workers);
  for (const int rank : ranks) {
    if (std::ranges::find(workers, rank, &WorkerReport::rank) != workers.end()) continue;
    text += fmt::format("\nrank {}  {}{}\n  no process to ask: it has ended, or has not joined yet\n", rank,
                        prefix, rank);
  }
  return text;
}

}  // namespace torchspan::launch
