#include "pipeline/runtime/step_failures.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace torchspan::pipeline {
namespace {

[[noreturn]] void throw_gone(const LocalPipeline& local, std::uint64_t step, std::uint32_t rank,
                             const Error& reason) {
  const auto place = std::find(local.ranks.begin(), local.ranks.end(), rank);
  const int worker = static_cast<int>(place - local.ranks.begin());
  std::vector<int> stages;
  for (std::size_t stage = 0; stage < local.plan.worker_of_stage.size(); ++stage) {
    if (local.plan.worker_of_stage[stage] == worker) stages.push_back(static_cast<int>(stage));
  }
  const std::string& name = local.plan.workers[static_cast<std::size_t>(worker)];
  throw Error(reason.kind(),
              fmt::format("step {} of pipeline '{}' ends: worker '{}', which owns stage {}, is "
                          "unreachable: {}",
                          step, local.options.name, name, fmt::join(stages, ", "), reason.message()))
      .with_worker(name);
}

}  // namespace

void throw_failure(const LocalPipeline& local, std::uint64_t step, const StepEvent& event) {
  if (const auto* failed = std::get_if<StepFailed>(&event)) throw EndedElsewhere(failed->error);
  if (const auto* departure = std::get_if<Departure>(&event)) {
    const bool ours = std::find(local.ranks.begin(), local.ranks.end(), departure->rank) != local.ranks.end();
    if (ours) throw_gone(local, step, departure->rank, departure->error);
  }
  if (const auto* lost = std::get_if<NotSent>(&event)) throw_gone(local, step, lost->rank, lost->error);
}

void check_presence(const LocalPipeline& local, std::uint64_t step) {
  for (const std::uint32_t rank : local.ranks) {
    if (local.worker.endpoint()->is_present(rank)) continue;
    throw_gone(local, step, rank, Error(ErrorKind::kDisconnected, "it died or left before the step"));
  }
}

}  // namespace torchspan::pipeline
