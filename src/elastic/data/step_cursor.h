#pragma once
#include <optional>

#include <torchspan/elastic/options.h>

#include "elastic/data/sample_dealer.h"

namespace torchspan::elastic {

/// The position of one rank, and the step that it has begun there.
class StepCursor {
 public:
  explicit StepCursor(const ElasticOptions& options) : dealer_(options), position_(options.start) {}

  const ElasticPosition& position() const { return position_; }
  void move_to(const ElasticPosition& position) { position_ = position; }
  /// Begins a step in a group; replaces one that was begun before.
  const ElasticStep& begin(int rank, int size, std::uint64_t generation);
  /// The step that was begun.
  const ElasticStep& step() const { return *step_; }
  /// The step that was begun is applied.
  void advance() { position_ = after_; }

 private:
  SampleDealer dealer_;
  ElasticPosition position_, after_;
  std::optional<ElasticStep> step_;
};

}  // namespace torchspan::elastic
