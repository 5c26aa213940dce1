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

/// One rank's part of the commit rule (docs/architecture/survival.md): which steps it has applied, and whether the
/// outcome of the current one is open. A table without I/O; for one thread at a time.
class Participant {
 public:
  /// `committed`: steps before the first one, such as those of a checkpoint.
  explicit Participant(std::int64_t committed) : committed_(committed) {}

  std::int64_t committed() const { return committed_; }
  std::uint64_t generation() const { return generation_; }
  bool holds_state() const { return holds_state_; }

  /// Call it before the vote is sent: from then on other ranks may commit the step.
  void prepare() { prepared_ = true; }
  /// The vote is complete, and every rank voted for the step: the caller applies it.
  void commit();
  /// The vote is complete, and a rank voted against the step.
  void reject() { prepared_ = false; }

  /// The limits and `finished` are left to the caller.
  Report report() const;

  /// What a new generation means for this rank's current step and state.
  enum class Adoption : std::uint8_t {
    kDiscard,  ///< the step is void: drop its gradients
    kApply,    ///< the step is committed: apply the gradients that were kept
    kCopy,     ///< the state is missing or outdated: copy a holder's
  };
  Adoption adopt(const Generation& generation, int rank);
  /// This rank has copied the state of its generation.
  void copied() { holds_state_ = true; }

 private:
  std::uint64_t generation_ = 0;
  std::int64_t committed_;
  bool holds_state_ = true;
  bool prepared_ = false;
};

}  // namespace torchspan::quorum
