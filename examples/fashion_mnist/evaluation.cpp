#include "fashion_mnist/evaluation.h"

#include <ATen/ATen.h>

namespace fashion_mnist {

std::int64_t count_right(const Dataset& data, const at::Tensor& positions, const Forward& forward) {
  const at::NoGradGuard no_grad;
  const Batch batch = data.batch(positions);
  return forward(batch.images).argmax(1).eq(batch.labels).sum().item<std::int64_t>();
}

double accuracy(const Dataset& data, const Forward& forward) {
  std::int64_t correct = 0;
  for (const at::Tensor& positions : batches_in_order(data.size(), kTestBatch))
    correct += count_right(data, positions, forward);
  return static_cast<double>(correct) / static_cast<double>(data.size());
}

}  // namespace fashion_mnist
