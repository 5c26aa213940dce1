#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <torchspan/detail/rpc/message.h>

namespace torchspan::pipeline {

/// The devices of the layer ranges of all workers when the pipeline was created, to which activations and gradients are
/// sent. Layers may move later: a receiver moves what it gets to its layers.
class StageDevices {
 public:
  /// What a worker reports of one of its layer ranges: a line that read() understands. It has the form of a line of
  /// SharedTensors::report(), with a negative number that no other worker reports, so workers that expect those ignore
  /// it.
  static std::string line(int range, c10::Device device);
  /// Reads the report of a worker; skips other lines.
  void read(std::uint32_t rank, const std::string& report);

  /// Where a worker uses what is sent to one of its layer ranges.
  rpc::DevicePlace of_range(std::uint32_t rank, int range) const;
  /// Where a worker uses gradients of parameters: on the device of those of its layer ranges that have one, if it is
  /// the same for all.
  rpc::DevicePlace of_worker(std::uint32_t rank) const;

 private:
  std::map<std::uint32_t, std::map<int, c10::Device>> devices_;  ///< by rank, then by layer range
};

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
