#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include <torchspan/elastic.h>

namespace torchspan::elastic {

/// Assigns the samples of an epoch to the ranks of each step. The order depends on (seed, epoch) and the share on the
/// position, the rank and the number of ranks, so that committed steps use every sample of an epoch exactly once,
/// however the ranks change.
class SampleDealer {
 public:
  explicit SampleDealer(const ElasticOptions& options);

  /// The share of a rank in the step at this position.
  ElasticStep deal(const ElasticPosition& at, int rank, int size);
  /// The position after that step.
  ElasticPosition after(const ElasticPosition& at, int size) const;

 private:
  std::int64_t count(const ElasticPosition& at, int size) const;
  void shuffle(std::int64_t epoch);

  const std::int64_t samples_, batch_;
  const bool per_rank_;
  const std::uint64_t seed_;
  std::int64_t epoch_ = -1;  ///< that `order_` belongs to
  std::vector<std::int64_t> order_;
};

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
