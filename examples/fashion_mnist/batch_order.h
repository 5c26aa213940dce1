#pragma once
#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "fashion_mnist/training.h"

namespace fashion_mnist {

/// The batches of a training, one per step, shuffled anew for each epoch. It depends only on the options, so a training
/// that resumes at any step goes on with the same batches.
class BatchOrder {
 public:
  /// `images` is the size of the data set.
  BatchOrder(std::int64_t images, const TrainingOptions& options);

  std::int64_t images() const { return images_; }
  /// In all epochs.
  std::int64_t steps() const { return epochs_ * per_epoch_; }
  /// The epoch of a step. Epochs are counted from 1, steps from 0.
  std::int64_t epoch(std::int64_t step) const { return step / per_epoch_ + 1; }
  /// Whether that many steps end an epoch.
  bool ends_epoch(std::int64_t steps) const { return steps % per_epoch_ == 0; }
  /// The positions of the images of a step.
  const at::Tensor& positions(std::int64_t step);

 private:
  std::int64_t images_, batch_, epochs_, per_epoch_;
  std::uint64_t seed_;
  std::int64_t shuffled_epoch_ = 0;  ///< that of batches_
  std::vector<at::Tensor> batches_;
};

}  // namespace fashion_mnist
