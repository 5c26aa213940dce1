#pragma once
#include <cstddef>
#include <map>
#include <vector>

#include "device/api/offload.h"
#include "pipeline/runtime/activation.h"

namespace torchspan::pipeline {

/// The inputs of one pass that wait in host memory between its forward and its repeated forward. Used by the training
/// thread.
class OffloadedInputs {
 public:
  /// Moves the tensors that are on devices with streams to host memory. Not the pipeline's own input, which the caller
  /// of the step holds.
  void put(device::Offloader& offloader, std::map<int, Activation>& inputs);
  /// Begins the copies back.
  void prefetch();
  /// Returns the tensors to their places.
  void restore(std::map<int, Activation>& inputs);

 private:
  struct Place {
    int link = kOutside;
    std::size_t member = 0;
    device::OffloadedTensor tensor;
  };
  std::vector<Place> places_;
};

}  // namespace torchspan::pipeline
