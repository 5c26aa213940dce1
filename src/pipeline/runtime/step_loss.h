#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::pipeline {

/// The sum of the losses of a worker's micro-batches, weighted with their shares of the batch. Losses on a device with
/// streams stay there until the sum is read, so that the host waits for the device once per step.
class StepLoss {
 public:
  void add(double share, at::Tensor loss);
  /// The sum, in the order of the calls of add(). May wait for a device.
  double read();

 private:
  double sum_ = 0;
  std::vector<double> unread_shares_;
  std::vector<at::Tensor> unread_;
};

}  // namespace torchspan::pipeline
