#include "launch/watch/incident.h"

#include <algorithm>
#include <fmt/format.h>

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

}  // namespace

std::string describe_notice(int rank, const TimeoutNotice& notice) {
  std::string text = fmt::format("rank {}: ", rank);
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

void add_timed_out(const Incident& incident, const std::string& prefix, std::vector<WorkerReport>& workers) {
  for (const auto& [rank, notice] : incident.notices) {
    auto worker = std::find_if(workers.begin(), workers.end(),
                               [rank = rank](const WorkerReport& one) { return one.rank >= rank; });
    if (worker == workers.end() || worker->rank != rank) {
      worker = workers.insert(worker, WorkerReport());
      worker->rank = rank;
      worker->answers = false;
    }
    if (!worker->answers) worker->name = fmt::format("{}{}", prefix, rank);
    worker->answers = true;
    if (worker->process_state == 'X' || worker->process_state == 'Z') worker->process_state = '?';
    add_notice(notice, *worker);
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
