#include "pipeline/policies/tables.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace torchspan::pipeline {

bool Tables::is_looped() const {
  const auto& ranges = local_.plan.layer_ranges;
  const int workers = static_cast<int>(local_.plan.workers.size());
  for (std::size_t s = 0; s < ranges.size(); ++s) {
    if (ranges[s].worker != static_cast<int>(s) % workers) return false;
  }
  return static_cast<int>(ranges.size()) % workers == 0;
}

void Tables::check() const {
  if (local_.options.schedule != Schedule::kInterleaved || is_looped()) return;
  throw Error(
      ErrorKind::kInvalid,
      fmt::format(
          "Schedule::kInterleaved needs layer range s on worker s modulo the number of workers, and as many "
          "layer ranges on each worker; here they are on workers {}. Change PipelineOptions::workers, or use "
          "Schedule::k1F1B, which takes any plan",
          fmt::join(local_.plan.placement(1).rank_of_stage, ", ")));
}

schedule::Table Tables::make(StepKind kind, int micro_batches) const {
  const schedule::Placement placement = local_.plan.placement(micro_batches);
  if (kind == StepKind::kInfer || kind == StepKind::kLoss) return schedule::forward_only(placement);
  if (kind == StepKind::kForward || local_.options.schedule == Schedule::kGPipe)
    return schedule::gpipe(placement);
  const int workers = placement.ranks;
  const bool fits = micro_batches < workers || micro_batches % workers == 0;
  if (local_.options.schedule == Schedule::kInterleaved && fits) {
    return schedule::interleaved(
        {workers, micro_batches, static_cast<int>(placement.rank_of_stage.size()) / workers});
  }
  return schedule::one_forward_one_backward(placement, local_.options.max_in_flight);
}

const schedule::Table* Tables::find(StepKind kind, int micro_batches) {
  if (local_.options.schedule == Schedule::kArrival) return nullptr;
  auto& slot = made_[{kind, micro_batches}];
  if (!slot) slot = std::make_unique<schedule::Table>(make(kind, micro_batches));
  return slot.get();
}

}  // namespace torchspan::pipeline
