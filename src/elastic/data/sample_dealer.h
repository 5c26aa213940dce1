#pragma once
#include <cstdint>
#include <vector>

#include <torchspan/elastic/options.h>

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

}  // namespace torchspan::elastic
