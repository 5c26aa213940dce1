#include "pipeline/letters.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace torchspan::pipeline {
namespace {

[[noreturn]] void throw_gone(const Station& station, std::uint64_t step, std::uint32_t rank,
                             const Error& reason) {
  const auto place = std::find(station.ranks.begin(), station.ranks.end(), rank);
  const int worker = static_cast<int>(place - station.ranks.begin());
  std::vector<int> stages;
  for (std::size_t stage = 0; stage < station.plan.worker_of_stage.size(); ++stage) {
    if (station.plan.worker_of_stage[stage] == worker) stages.push_back(static_cast<int>(stage));
  }
  const std::string& name = station.plan.workers[static_cast<std::size_t>(worker)];
  throw Error(reason.kind(),
              fmt::format("step {} of pipeline '{}' ends: worker '{}', which owns stage {}, is out of "
                          "reach: {}",
                          step, station.options.name, name, fmt::join(stages, ", "), reason.message()))
      .with_worker(name);
}

}  // namespace

void throw_failure(const Station& station, std::uint64_t step, const Letter& letter) {
  if (const auto* failed = std::get_if<StepFailed>(&letter)) throw EndedElsewhere(failed->error);
  if (const auto* departure = std::get_if<Departure>(&letter)) {
    const bool ours =
        std::find(station.ranks.begin(), station.ranks.end(), departure->rank) != station.ranks.end();
    if (ours) throw_gone(station, step, departure->rank, departure->error);
  }
  if (const auto* lost = std::get_if<NotSent>(&letter)) throw_gone(station, step, lost->rank, lost->error);
}

void check_presence(const Station& station, std::uint64_t step) {
  for (const std::uint32_t rank : station.ranks) {
    if (station.worker.endpoint()->is_present(rank)) continue;
    throw_gone(station, step, rank, Error(ErrorKind::kDisconnected, "it died or left before the step"));
  }
}

}  // namespace torchspan::pipeline
