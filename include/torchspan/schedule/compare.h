#pragma once
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <torchspan/schedule.h>

/// Compares all schedules for one pipeline.
namespace torchspan::schedule {

/// The pipeline to find a schedule for.
struct CompareOptions {
  int ranks = 1;
  int micro_batches = 1;
  /// Costs of one micro-batch through all layers of a rank: one entry for all ranks, or one for each. A
  /// schedule with several stages per rank divides them evenly; transfer times do not change.
  std::vector<Costs> costs = {Costs{}};
  /// Memory limit of a rank, in the unit of Costs::activation.
  double memory_limit = std::numeric_limits<double>::infinity();
};

/// A schedule and its simulated step.
struct Candidate {
  Table table;
  int stages_per_rank = 1;
  Timeline timeline;
  bool fits = true;  ///< in the memory limit
};

/// The schedules for a pipeline, best first, and why others are left out.
struct Comparison {
  std::vector<Candidate> candidates;
  std::vector<std::string> undefined;  ///< error texts of schedules that are not defined for the pipeline
};

/// Simulates each schedule that is defined for the pipeline, with one and two stages per rank, and
/// zero_bubble() for its memory limit. Those that fit come first; then the shortest step, the shortest
/// step_period(), the least memory. Throws Error{kInvalid} that names the field, or if the limit is too small
/// for one micro-batch.
Comparison compare(const CompareOptions& options);

/// Divides the costs of each rank (one entry for all, or one for each) evenly among its stages; returns one
/// entry per stage.
std::vector<Costs> divide_costs(const std::vector<Costs>& by_rank, const std::vector<int>& rank_of_stage);

/// The unit of Costs::activation and the other memory of a list of costs.
enum class MemoryUnit : std::uint8_t { kAny, kBytes };

/// Costs as JSON, for `torchspan schedule best --costs-file`: milliseconds and memory by stage.
std::string costs_json(const std::vector<Costs>& costs, MemoryUnit unit = MemoryUnit::kAny);

}  // namespace torchspan::schedule
