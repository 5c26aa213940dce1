#include "pipeline/runtime/step_failures.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <optional>

namespace torchspan::pipeline {
namespace {

constexpr Duration kReportLimit = std::chrono::seconds(1);

struct Place {
  std::size_t replica = 0;
  std::size_t worker = 0;  ///< of the plan
};

/// Nullopt for workers of other pipelines.
std::optional<Place> find_worker(const LocalPipeline& local, std::uint32_t rank) {
  for (std::size_t replica = 0; replica < local.grid.ranks.size(); ++replica) {
    const auto& ranks = local.grid.ranks[replica];
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    if (found != ranks.end()) return Place{replica, static_cast<std::size_t>(found - ranks.begin())};
  }
  return std::nullopt;
}

}  // namespace

Error gone(const LocalPipeline& local, std::uint64_t step, std::uint32_t rank, const Error& reason) {
  const Place place = *find_worker(local, rank);
  std::vector<int> stages;
  for (std::size_t stage = 0; stage < local.plan.worker_of_stage.size(); ++stage) {
    if (local.plan.worker_of_stage[stage] == static_cast<int>(place.worker))
      stages.push_back(static_cast<int>(stage));
  }
  const std::string& name = local.grid.names[place.replica][place.worker];
  const std::string replica =
      local.grid.count() > 1 ? fmt::format(" of replica {}", place.replica) : std::string();
  return Error(reason.kind(), fmt::format("step {} of pipeline '{}' ends: worker '{}' (rank {}), which owns "
                                          "stage {}{}, is unreachable: {}",
                                          step, local.options.name, name, rank, fmt::join(stages, ", "),
                                          replica, reason.message()))
      .with_worker(name);
}

void throw_failure(const LocalPipeline& local, std::uint64_t step, const StepEvent& event) {
  if (const auto* failed = std::get_if<StepFailed>(&event)) throw EndedElsewhere(failed->error);
  if (const auto* departure = std::get_if<Departure>(&event)) {
    if (find_worker(local, departure->rank)) throw gone(local, step, departure->rank, departure->error);
  }
  if (const auto* lost = std::get_if<NotSent>(&event)) throw gone(local, step, lost->rank, lost->error);
}

void report_failure(const LocalPipeline& local, std::uint64_t step, const Error& error) {
  const Deadline until = local.executor().deadline_in(kReportLimit);
  const StepFailed report{{local.id, step}, error};
  std::vector<Future<StepFailed::Reply>> replies;
  for (const std::uint32_t rank : local.grid.all_ranks()) {
    if (rank == local.ranks()[static_cast<std::size_t>(local.me)] ||
        !local.worker.endpoint()->is_present(rank))
      continue;
    try {
      replies.push_back(local.worker.request(static_cast<int>(rank), report, until));
    } catch (const Error&) {  // the worker departed meanwhile
    }
  }
  for (const auto& reply : replies) {
    try {
      reply.wait(until);
    } catch (const Error&) {  // a worker that departed, is stopped, or has no such pipeline any more
    }
  }
}

namespace {

/// Why a worker died or left, which a request to it reports at once.
Error reason_of_absence(const LocalPipeline& local, std::uint64_t step, std::uint32_t rank) {
  try {
    const Deadline until = local.executor().deadline_in(kReportLimit);
    static_cast<void>(
        local.worker.request(static_cast<int>(rank), AskState{{local.id, step}}, until).wait(until));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kDisconnected) return error;
  }
  return {ErrorKind::kDisconnected, "it died or left before the step"};
}

}  // namespace

void check_presence(const LocalPipeline& local, std::uint64_t step) {
  for (const std::uint32_t rank : local.grid.all_ranks()) {
    if (local.worker.endpoint()->is_present(rank)) continue;
    throw gone(local, step, rank, reason_of_absence(local, step, rank));
  }
}

}  // namespace torchspan::pipeline
