#include "pipeline/policies/tables.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <optional>
#include <vector>

#include "core/api/throw_invalid.h"

namespace torchspan::pipeline {

namespace {

/// The workers of the layer ranges that a schedule requires, and the requirement as text.
struct RequiredPlacement {
  std::vector<int> rank_of_stage;
  const char* text = "";
};

/// Nullopt for schedules that take any plan.
std::optional<RequiredPlacement> required_placement(Schedule schedule, int workers, int ranges) {
  const int chunks = std::max(1, ranges / workers);
  switch (schedule) {
    case Schedule::kInterleaved:
      return RequiredPlacement{
          schedule::looped({workers, 1, chunks}).rank_of_stage,
          "kInterleaved needs layer range s on worker s modulo the number of workers, and as "
          "many layer ranges on each worker"};
    case Schedule::kZB1P:
      return RequiredPlacement{
          schedule::looped({workers, 1, chunks}).rank_of_stage,
          "kZB1P needs layer range s on worker s modulo the number of workers, and as many "
          "layer ranges on each worker"};
    case Schedule::kZBH1:
      return RequiredPlacement{schedule::looped({workers, 1, 1}).rank_of_stage,
                               "kZBH1 needs one layer range on each worker"};
    case Schedule::kZBH2:
      return RequiredPlacement{schedule::looped({workers, 1, 1}).rank_of_stage,
                               "kZBH2 needs one layer range on each worker"};
    case Schedule::kZBV:
      return RequiredPlacement{
          schedule::v_shaped({workers, 1, 2}).rank_of_stage,
          "kZBV needs two layer ranges on each worker: one on each worker in turn, then one on "
          "each in reverse order"};
    case Schedule::kDualPipeV:
      return RequiredPlacement{
          schedule::v_shaped({workers, 1, 2}).rank_of_stage,
          "kDualPipeV needs two layer ranges on each worker: one on each worker in turn, then "
          "one on each in reverse order"};
    default:
      return std::nullopt;
  }
}

}  // namespace

void Tables::check() const {
  const std::vector<int> ranks = local_.plan.placement(1).rank_of_stage;
  const auto required = required_placement(
      local_.options.schedule, static_cast<int>(local_.plan.workers.size()), static_cast<int>(ranks.size()));
  if (!required || ranks == required->rank_of_stage) return;
  throw_invalid(
      "Schedule::{}; here they are on workers {}. Change PipelineOptions::workers or balance, or use "
      "Schedule::k1F1B, which takes any plan",
      required->text, fmt::join(ranks, ", "));
}

schedule::Table Tables::custom(int micro_batches) const {
  const schedule::Placement placement = local_.plan.placement(micro_batches);
  schedule::Table table = local_.options.custom_schedule(placement);
  const bool fits = table.rank_of_stage == placement.rank_of_stage && table.micro_batches == micro_batches &&
                    table.ranks() == placement.ranks;
  if (!fits) {
    throw_invalid(
        "PipelineOptions::custom_schedule returned a table of stages on ranks {} with {} micro-batches on {} "
        "ranks; the plan has layer ranges on workers {}, {} micro-batches and {} workers",
        fmt::join(table.rank_of_stage, ", "), table.micro_batches, table.ranks(),
        fmt::join(placement.rank_of_stage, ", "), micro_batches, placement.ranks);
  }
  schedule::validate(table);
  for (const auto& row : table.actions) {
    int without_backward = 0;
    for (const schedule::Action& action : row) {
      if (action.kind == schedule::ActionKind::kForward) ++without_backward;
      if (action.kind == schedule::ActionKind::kBackward ||
          action.kind == schedule::ActionKind::kInputGradient)
        --without_backward;
    }
    if (without_backward == 0) continue;
    throw_invalid(
        "PipelineOptions::custom_schedule returned a table in which micro-batches have no backward; a "
        "training step needs one for each");
  }
  return table;
}

schedule::Table Tables::make(StepKind kind, int micro_batches) const {
  const schedule::Placement placement = local_.plan.placement(micro_batches);
  if (kind == StepKind::kInfer || kind == StepKind::kLoss) return schedule::forward_only(placement);
  if (kind == StepKind::kForward) return schedule::gpipe(placement);
  const int workers = placement.ranks;
  const schedule::Shape shape{workers, micro_batches,
                              static_cast<int>(placement.rank_of_stage.size()) / workers};
  switch (local_.options.schedule) {
    case Schedule::kGPipe:
      return schedule::gpipe(placement);
    case Schedule::kInterleaved:
      if (micro_batches >= workers && micro_batches % workers != 0) break;
      return schedule::interleaved(shape);
    case Schedule::kZBH1:
      return schedule::zero_bubble_h1(shape);
    case Schedule::kZBH2:
      return schedule::zero_bubble_h2(shape);
    case Schedule::kZB1P:
      if (micro_batches % std::max(1, micro_batches / workers) != 0) break;
      return schedule::interleaved_zero_bubble(shape);
    case Schedule::kZBV:
      return schedule::zero_bubble_v(shape);
    case Schedule::kDualPipeV:
      if (micro_batches < 2 * workers) break;
      return schedule::dual_pipe_v(shape);
    case Schedule::kCustom:
      return custom(micro_batches);
    default:
      break;
  }
  // Also for numbers of micro-batches, as of a small batch, for which the schedule is not defined.
  return schedule::one_forward_one_backward(placement, local_.options.max_in_flight);
}

const schedule::Table* Tables::find(StepKind kind, int micro_batches) {
  if (local_.options.schedule == Schedule::kArrival) return nullptr;
  auto& slot = made_[{kind, micro_batches}];
  if (!slot) slot = std::make_unique<schedule::Table>(make(kind, micro_batches));
  return slot.get();
}

}  // namespace torchspan::pipeline
