#pragma once
#include <cstdint>
#include <vector>

#include <torchspan/data.h>

namespace torchspan::data {

struct SamplerOptions {
  std::int64_t samples = 0;  ///< of an epoch
  std::int64_t batch = 0;
  bool batch_per_rank = false;  ///< whether `batch` counts the samples of each rank
  bool shuffle = true;
  bool drop_last = false;  ///< leaves out the last step of an epoch if it is smaller
  std::uint64_t seed = 0;
};

/// Assigns the samples of an epoch to the ranks of each step. The order depends on (seed, epoch) and the share on the
/// position, the rank and the number of ranks, so that consecutive steps use every sample of an epoch exactly once,
/// however the ranks change.
class Sampler {
 public:
  explicit Sampler(const SamplerOptions& options) : options_(options) {}

  const SamplerOptions& options() const { return options_; }
  /// The share of a rank in the step at this position.
  DataStep step(const DataPosition& at, int rank, int size);
  /// `at`, or the beginning of the next epoch if the current one has no more steps.
  DataPosition of_step(const DataPosition& at, int size) const;
  /// The position after that step.
  DataPosition after(const DataPosition& at, int size) const;

  /// Samples of a step that is not the last one of its epoch.
  std::int64_t full_step(int size) const;
  std::int64_t steps_per_epoch(int size) const;

 private:
  std::int64_t count(const DataPosition& at, int size) const;
  void shuffle(std::int64_t epoch);

  SamplerOptions options_;
  std::int64_t epoch_ = -1;  ///< that `order_` belongs to
  std::vector<std::int64_t> order_;
};

}  // namespace torchspan::data
