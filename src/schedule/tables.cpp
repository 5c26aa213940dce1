#include "schedule/tables.h"

#include <algorithm>
#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

namespace torchspan::schedule {
namespace {

void at_least_one(const std::string& schedule, const char* field, int value) {
  if (value < 1) {
    throw_invalid("{}: {} is {}; at least 1 is needed", schedule, field, value);
  }
}

void check_size(const std::string& schedule, std::int64_t stages, std::int64_t micro_batches) {
  if (stages > kMostCells || stages * micro_batches > kMostCells) {
    throw_invalid("{}: {} stages times {} micro_batches are more than {} cells", schedule, stages,
                  micro_batches, kMostCells);
  }
}

}  // namespace

char letter(ActionKind kind) {
  const auto number = static_cast<std::size_t>(kind);
  return number < 4 ? "FBIW"[number] : '?';
}

std::string to_string(const Action& action) {
  return fmt::format("{}{}{}", action.stage, letter(action.kind), action.micro_batch);
}

Placement looped(Shape shape) {
  check(shape, "looped");
  Placement placement{.rank_of_stage = {}, .micro_batches = shape.micro_batches, .ranks = shape.ranks};
  for (int stage = 0; stage < shape.ranks * shape.stages_per_rank; ++stage) {
    placement.rank_of_stage.push_back(stage % shape.ranks);
  }
  return placement;
}

Placement v_shaped(Shape shape) {
  check(shape, "v_shaped");
  check_stages_per_rank(shape, "v_shaped", 2);
  Placement placement{.rank_of_stage = {}, .micro_batches = shape.micro_batches, .ranks = shape.ranks};
  for (int rank = 0; rank < shape.ranks; ++rank) placement.rank_of_stage.push_back(rank);
  for (int rank = shape.ranks; rank > 0; --rank) placement.rank_of_stage.push_back(rank - 1);
  return placement;
}

void check(const Shape& shape, const std::string& schedule) {
  at_least_one(schedule, "ranks", shape.ranks);
  at_least_one(schedule, "micro_batches", shape.micro_batches);
  at_least_one(schedule, "stages_per_rank", shape.stages_per_rank);
  check_size(schedule, static_cast<std::int64_t>(shape.ranks) * shape.stages_per_rank, shape.micro_batches);
}

void check_stages_per_rank(const Shape& shape, const std::string& schedule, int expected,
                           const std::string& instead) {
  if (shape.stages_per_rank == expected) return;
  throw_invalid("{}: stages_per_rank is {}; this schedule has {} per rank{}", schedule, shape.stages_per_rank,
                expected == 1 ? "one stage" : "two stages", instead);
}

int check(const Placement& placement, const std::string& schedule) {
  if (placement.rank_of_stage.empty()) {
    throw_invalid("{}: rank_of_stage is empty; a pipeline has at least one stage", schedule);
  }
  at_least_one(schedule, "micro_batches", placement.micro_batches);
  const auto stages = static_cast<std::int64_t>(placement.rank_of_stage.size());
  check_size(schedule, stages, placement.micro_batches);
  const std::int64_t largest =
      *std::max_element(placement.rank_of_stage.begin(), placement.rank_of_stage.end());
  const std::int64_t ranks = placement.ranks == 0 ? largest + 1 : placement.ranks;
  for (std::size_t stage = 0; stage < placement.rank_of_stage.size(); ++stage) {
    const int rank = placement.rank_of_stage[stage];
    if (rank < 0 || rank >= ranks || rank >= kMostCells) {
      throw_invalid("{}: rank_of_stage[{}] is {}; there are {} ranks", schedule, stage, rank,
                    std::min(ranks, kMostCells));
    }
  }
  if (ranks > kMostCells) {
    throw_invalid("{}: ranks is {}; expected at most {}", schedule, ranks, kMostCells);
  }
  return static_cast<int>(ranks);
}

void check(const std::vector<Costs>& costs, std::size_t stages, const std::string& function) {
  if (costs.size() != 1 && costs.size() != stages) {
    throw_invalid("{}: costs has {} entries; expected one for all stages, or one for each of the {}",
                  function, costs.size(), stages);
  }
  for (std::size_t stage = 0; stage < costs.size(); ++stage) {
    const Costs& cost = costs[stage];
    const Duration least = std::min({cost.forward, cost.input_gradient, cost.weight_gradient, cost.transfer});
    const bool memory_fits =
        cost.activation >= 0 && cost.weight_input.value_or(0) >= 0 && cost.recomputation >= 0;
    if (least < Duration::zero() || !memory_fits) {
      throw_invalid("{}: costs[{}] has a negative entry", function, stage);
    }
  }
}

Table empty_table(std::string name, const Placement& placement, int ranks) {
  return {.name = std::move(name),
          .rank_of_stage = placement.rank_of_stage,
          .micro_batches = placement.micro_batches,
          .actions = std::vector<std::vector<Action>>(static_cast<std::size_t>(ranks))};
}

void append_forwards(Table& table) {
  for (int step = 0; step < table.stages() + table.micro_batches - 1; ++step) {
    const int latest = std::min(step, table.stages() - 1);
    const int earliest = std::max(0, step - table.micro_batches + 1);
    for (int stage = latest; stage >= earliest; --stage) {
      const auto rank = static_cast<std::size_t>(table.rank_of_stage[static_cast<std::size_t>(stage)]);
      table.actions[rank].push_back({ActionKind::kForward, stage, step - stage});
    }
  }
}

void Sequence::backward(int stage) {
  // A whole backward takes the micro-batch that an input gradient would.
  const int micro_batch = counts_[{ActionKind::kInputGradient, stage}]++;
  add({ActionKind::kBackward, stage, micro_batch});
}

void Sequence::input_gradient(int stage) {
  const int micro_batch = counts_[{ActionKind::kInputGradient, stage}]++;
  add({ActionKind::kInputGradient, stage, micro_batch});
  pending_.push_back({ActionKind::kWeightGradient, stage, micro_batch});
}

void Sequence::oldest_weight_gradient() {
  if (pending_.empty()) return;
  add(pending_.front());
  pending_.pop_front();
}

void Sequence::weight_gradient(int stage) {
  const auto oldest = std::find_if(pending_.begin(), pending_.end(),
                                   [&](const Action& action) { return action.stage == stage; });
  if (oldest == pending_.end()) return;
  add(*oldest);
  pending_.erase(oldest);
}

int Sequence::count(ActionKind kind, int stage) const {
  const auto known = counts_.find({kind, stage});
  return known == counts_.end() ? 0 : known->second;
}

}  // namespace torchspan::schedule
