#include "pipeline/runtime/step_loss.h"

#include <cstddef>
#include <utility>

#include <torchspan/detail/device/streams.h>

#include "device/api/tensors.h"

namespace torchspan::pipeline {

void StepLoss::add(double share, at::Tensor loss) {
  if (unread_.empty() && !device::has_streams(loss.device())) {
    sum_ += share * loss.item<double>();
    return;
  }
  unread_shares_.push_back(share);
  unread_.push_back(std::move(loss));
}

double StepLoss::read() {
  const std::vector<double> values = device::read_numbers(unread_);
  for (std::size_t i = 0; i < values.size(); ++i) sum_ += unread_shares_[i] * values[i];
  unread_shares_.clear();
  unread_.clear();
  return sum_;
}

}  // namespace torchspan::pipeline
