#include "fashion_mnist/evaluation.h"

#include <ATen/ATen.h>

namespace fashion_mnist {

double accuracy(const Dataset& data, const Forward& forward, const Team& team) {
  constexpr std::int64_t kTestBatch = 500;
  const at::NoGradGuard no_grad;
  std::int64_t correct = 0;
  for (const at::Tensor& positions : batches_in_order(data.size(), kTestBatch)) {
    const Batch batch = data.batch(team.part(positions));
    correct += forward(batch.images).argmax(1).eq(batch.labels).sum().item<std::int64_t>();
  }
  return team.sum(static_cast<double>(correct)) / static_cast<double>(data.size());
}

}  // namespace fashion_mnist
