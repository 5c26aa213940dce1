#include "pipeline/runtime/step_loss.h"

#include <cstddef>

#include <torchspan/detail/device/streams.h>

#include "device/api/numbers.h"

namespace torchspan::pipeline {

/// The copy keeps the value if the loss function reuses its tensor.
void StepLoss::add(double share, const at::Tensor& loss) {
  if (unread_.empty() && !device::has_streams(loss.device())) {
    sum_ += share * loss.item<double>();
    return;
  }
  unread_shares_.push_back(share);
  unread_.push_back(loss.detach().clone());
}

double StepLoss::read() {
  const std::vector<double> values = device::read_numbers(unread_);
  for (std::size_t i = 0; i < values.size(); ++i) sum_ += unread_shares_[i] * values[i];
  unread_shares_.clear();
  unread_.clear();
  return sum_;
}

}  // namespace torchspan::pipeline
