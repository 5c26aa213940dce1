#include "schedule/memory_claims.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include <torchspan/core/error.h>

namespace torchspan::schedule {
double MemoryClaims::most(const Costs& costs) { return std::max(costs.activation, weight_input(costs)); }

MemoryClaims::MemoryClaims(const Table& table, const std::vector<Costs>& costs, double limit)
    : rank_of_stage_(table.rank_of_stage),
      costs_(costs),
      is_limited_(std::isfinite(limit)),
      ranks_(table.actions.size()) {
  if (!is_limited_) return;
  rounding_ = 1e-9 * limit;
  std::vector<Claim> whole(ranks_.size());
  std::vector<double> repeated(ranks_.size(), 0);  // one forward at a time
  for (int stage = 0; stage < table.stages(); ++stage) {
    whole[rank_of(stage)].missing += most(costs_of(stage));
    ++whole[rank_of(stage)].unfinished;
    repeated[rank_of(stage)] = std::max(repeated[rank_of(stage)], costs_of(stage).recomputation);
  }
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const double needed = whole[rank].missing + repeated[rank];
    if (needed > limit + rounding_) {
      throw Error(
          ErrorKind::kInvalid,
          fmt::format("zero_bubble: memory_limit is {}; one micro-batch needs {} on rank {}. Raise the "
                      "limit, or use more micro-batches",
                      limit, needed, rank));
    }
    ranks_[rank].free = limit - repeated[rank];
    ranks_[rank].claims.assign(static_cast<std::size_t>(table.micro_batches), whole[rank]);
  }
}

bool MemoryClaims::admits(const Action& forward) const {
  if (!is_limited_) return true;
  const Rank& rank = ranks_[rank_of(forward.stage)];
  const double size = most(costs_of(forward.stage));
  const auto mine = static_cast<std::size_t>(forward.micro_batch);
  double free = rank.free - size;
  if (free < -rounding_) return false;
  for (std::size_t i = rank.oldest; i < rank.claims.size(); ++i) {
    const Claim& claim = rank.claims[i];
    const double missing = claim.missing - (i == mine ? size : 0);
    if (missing > free + rounding_) return false;
    free += claim.held + (i == mine ? size : 0);
    // Forwards start in order, so micro-batches from here on are not in memory and find the whole limit free.
    if (i > mine && claim.held == 0) break;
  }
  return true;
}

void MemoryClaims::start(const Action& action) {
  if (!is_limited_) return;
  Rank& rank = ranks_[rank_of(action.stage)];
  Claim& claim = rank.claims[static_cast<std::size_t>(action.micro_batch)];
  const Costs& costs = costs_of(action.stage);
  const auto grow = [&](double by) {
    claim.held += by;
    rank.free -= by;
  };
  switch (action.kind) {
    case ActionKind::kForward:
      claim.missing -= most(costs);
      grow(most(costs));
      break;
    case ActionKind::kInputGradient:
      grow(weight_input(costs) - most(costs));
      break;
    case ActionKind::kWeightGradient:
      grow(-weight_input(costs));
      --claim.unfinished;
      break;
    case ActionKind::kBackward:
      grow(-most(costs));
      --claim.unfinished;
      break;
  }
  while (rank.oldest < rank.claims.size() && rank.claims[rank.oldest].unfinished == 0) ++rank.oldest;
}

}  // namespace torchspan::schedule
