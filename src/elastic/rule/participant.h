#pragma once
#include <cstdint>

#include "elastic/rule/generation.h"

namespace torchspan::elastic {

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

}  // namespace torchspan::elastic
