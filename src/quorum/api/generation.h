#pragma once
#include <cstdint>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan::quorum {

/// What a rank reports when it needs the next generation. It then takes part in no step until it has the answer.
struct Report {
  std::uint64_t generation = 0;  ///< the last one that it adopted; 0: none
  std::int64_t committed = 0;    ///< steps that it has applied
  bool holds_state = false;      ///< false: it must copy the state of another rank
  /// It has voted for step `committed` + 1, has kept its averaged gradients, and does not know the outcome.
  bool prepared = false;
  std::int64_t target = 0;   ///< steps that its program requests
  int min_ranks = 1;         ///< no generation is smaller
  Duration late_limit{};     ///< how long a rank waits for the reports of the others
  Duration too_few_limit{};  ///< how long it waits while there are fewer than min_ranks
};

/// A set of ranks that trains together until one of them ends or fails, or another one joins.
struct Generation {
  std::uint64_t number = 0;
  std::int64_t step = 0;    ///< steps that are committed
  std::int64_t target = 0;  ///< the most steps that any of its ranks requests
  std::vector<int> ranks;   ///< ascending
  /// Ranks that have the state after `step`; the others copy it from the last one.
  std::vector<int> holders = {};
  bool complete = false;  ///< all ranks hold the state and need no further step
  friend bool operator==(const Generation&, const Generation&) = default;
};

}  // namespace torchspan::quorum
