#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/plan/stage_devices.h"

namespace torchspan::pipeline {

/// The workers of all replicas of a pipeline. Workers with the same index own the same stages.
struct ReplicaGrid {
  int mine = 0;                                      ///< the replica of this worker
  std::vector<std::vector<std::string>> names = {};  ///< by replica, then by worker of the plan
  std::vector<std::vector<std::uint32_t>> ranks = {};
  StageDevices devices = {};

  int count() const { return static_cast<int>(names.size()); }
  std::vector<std::string> all_names() const;
  std::vector<std::uint32_t> all_ranks() const;
  /// The names of the workers that own the same stages, by replica.
  std::vector<std::string> names_of(int worker) const;
};

/// Splits the owners of the stages of all replicas, replica after replica, into one list per replica. Throws
/// Error{kInvalid} if they cannot be split, if a worker is in two replicas, or if replicas give their stages to workers
/// in different patterns.
std::vector<std::vector<std::string>> owners_by_replica(const std::vector<std::string>& workers, int replicas,
                                                        std::size_t stages);

/// Each name once, in the order of the first occurrence.
std::vector<std::string> distinct(const std::vector<std::string>& names);

}  // namespace torchspan::pipeline
