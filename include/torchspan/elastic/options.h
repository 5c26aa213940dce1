#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/collective/group.h>
#include <torchspan/core/time.h>
#include <torchspan/data_parallel/options.h>

namespace torchspan {

/// Progress of a training run.
struct ElasticPosition {
  std::int64_t step = 0;   ///< committed steps
  std::int64_t epoch = 0;  ///< committed epochs
  std::int64_t next = 0;   ///< samples of the current epoch that committed steps have used
  friend bool operator==(const ElasticPosition&, const ElasticPosition&) = default;
};

struct ElasticOptions {
  std::int64_t samples = 0;  ///< size of the data set; required
  /// Samples in each step; required. The last step of an epoch uses what is left.
  std::int64_t batch = 0;
  /// Whether `batch` counts the samples of each rank, so that a step with fewer ranks uses fewer samples. False: those
  /// of all ranks together, so that the remaining ranks take over the share of a missing one.
  bool batch_per_rank = false;
  std::uint64_t seed = 0;      ///< of the order of samples in each epoch
  ElasticPosition start = {};  ///< of the state that rank 0 begins with, such as that of a checkpoint
  int min_ranks = 1;           ///< with fewer ranks, training waits for replacements
  Duration too_few_limit = std::chrono::minutes(10);  ///< the longest such wait; run() then throws kTimedOut
  /// How long ranks wait for a late rank, such as a stopped process, before they continue without it. Must exceed the
  /// longest step and the time to copy the state to a new rank. A rank that was left out joins again.
  Duration step_timeout = std::chrono::minutes(2);
  collective::GroupOptions group = {};  ///< backend, network and device
  data_parallel::DataParallelOptions data_parallel = {};
  std::string name = "trainer";  ///< unique among the trainers of a program; the same on all ranks

  /// Throws Error{kInvalid} that names the wrong field.
  void validate() const;
};

/// One rank's part of one step.
struct ElasticStep {
  std::int64_t number = 0;  ///< committed steps before this one
  std::int64_t epoch = 0;
  int rank = 0;                       ///< in the current group: not the worker's rank
  int size = 1;                       ///< number of ranks in the current group
  std::uint64_t generation = 0;       ///< counts the groups
  std::vector<std::int64_t> samples;  ///< indices into the data set; at least one
  /// The factor of the sum of the losses of `samples`, so that the average over ranks is the mean over the whole
  /// batch; 0 if this rank has no share of a small batch.
  double weight = 0;
  std::uint64_t seed = 0;  ///< different for each step and rank; for dropout and augmentation

  /// Splits `samples` into parts of at most `size`, in order. Run all but the last under no_sync().
  std::vector<std::vector<std::int64_t>> micro_batches(std::int64_t size) const;
};

}  // namespace torchspan
