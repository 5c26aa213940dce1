#include "fashion_mnist/team.h"

#include <fmt/format.h>

#include <ATen/ATen.h>

namespace fashion_mnist {

std::string Team::name() const {
  return group == nullptr ? "one process" : fmt::format("{} rank{}", size, size == 1 ? "" : "s");
}

at::Tensor Team::part(const at::Tensor& positions) const {
  return positions.tensor_split(size)[static_cast<std::size_t>(rank)];
}

double Team::sum(double mine) const {
  if (group == nullptr) return mine;
  return group->all_reduce(at::full({1}, mine, at::device(device).dtype(at::kDouble))).wait().item<double>();
}

void Team::wait_for_each_other() const {
  if (group != nullptr) group->barrier();
}

double accuracy(const Dataset& data, const Forward& forward, const Team& team) {
  std::int64_t correct = 0;
  for (const at::Tensor& positions : batches_in_order(data.size(), kTestBatch))
    correct += count_right(data, team.part(positions), forward);
  return team.sum(static_cast<double>(correct)) / static_cast<double>(data.size());
}

}  // namespace fashion_mnist
