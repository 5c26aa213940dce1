#pragma once
#include <cstdint>
#include <map>
#include <string>

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

}  // namespace torchspan::pipeline
