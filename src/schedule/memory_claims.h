#pragma once
#include <vector>

#include <torchspan/schedule.h>

namespace torchspan::schedule {

/// The memory of each rank while an order is built. Admits a forward only if all micro-batches can still
/// finish one after another within the limit (the banker's algorithm), so that memory cannot deadlock.
class MemoryClaims {
 public:
  /// Throws Error{kInvalid} if a rank has no room for one micro-batch.
  MemoryClaims(const Table& table, const std::vector<Costs>& costs, double limit);

  bool admits(const Action& forward) const;
  void start(const Action& action);

 private:
  struct Claim {
    double held = 0;  ///< by one micro-batch on one rank
    double missing = 0;
    int unfinished = 0;  ///< stages of the rank whose backward has not run
  };
  struct Rank {
    double free = 0;
    std::vector<Claim> claims;  ///< by micro-batch
    std::size_t oldest = 0;     ///< the first unfinished micro-batch
  };

  const Costs& costs_of(int stage) const {
    return costs_.size() == 1 ? costs_.front() : costs_[static_cast<std::size_t>(stage)];
  }
  /// The most memory of a micro-batch at a stage.
  static double most(const Costs& costs);
  static double weight_input(const Costs& costs) { return costs.weight_input.value_or(costs.activation); }
  std::size_t rank_of(int stage) const {
    return static_cast<std::size_t>(rank_of_stage_[static_cast<std::size_t>(stage)]);
  }

  std::vector<int> rank_of_stage_;
  const std::vector<Costs>& costs_;
  bool is_limited_;
  double rounding_ = 0;  ///< sums of shares such as 1/3 may exceed the limit by this much
  std::vector<Rank> ranks_;
};

}  // namespace torchspan::schedule
