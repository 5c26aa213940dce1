#include "fashion_mnist/batch_order.h"

#include "fashion_mnist/dataset.h"

namespace fashion_mnist {

BatchOrder::BatchOrder(std::int64_t images, const TrainingOptions& options)
    : images_(images),
      batch_(options.batch),
      epochs_(options.epochs),
      per_epoch_((images + options.batch - 1) / options.batch),
      seed_(options.seed) {}

const at::Tensor& BatchOrder::positions(std::int64_t step) {
  if (epoch(step) != shuffled_epoch_) {
    shuffled_epoch_ = epoch(step);
    batches_ = shuffled_batches(images_, batch_, seed_ + static_cast<std::uint64_t>(shuffled_epoch_));
  }
  return batches_[static_cast<std::size_t>(step % per_epoch_)];
}

}  // namespace fashion_mnist
