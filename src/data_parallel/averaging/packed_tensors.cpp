#include "data_parallel/averaging/packed_tensors.h"

#include <algorithm>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

namespace torchspan::data_parallel {

at::Tensor pack(const collective::Group& group, const std::vector<at::Tensor>& tensors) {
  std::int64_t size = 0;
  for (const at::Tensor& tensor : tensors) size += tensor.numel();
  const at::Tensor& first = tensors[0];
  const at::Tensor flat =
      first.is_cpu()
          ? group.allocate({size}, first.scalar_type())
          : at::empty({size}, at::TensorOptions().dtype(first.scalar_type()).device(first.device()));
  const std::vector<at::Tensor> parts = parts_of(flat, tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i) parts[i].copy_(tensors[i].detach());
  return flat;
}

std::vector<at::Tensor> parts_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  std::int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    parts.push_back(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
  }
  return parts;
}

PackedAverages::PackedAverages(const collective::Group& group, const std::vector<at::Tensor>& tensors)
    : count_(tensors.size()) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto same = std::find_if(messages_.begin(), messages_.end(), [&](const Message& message) {
      return message.tensors[0].scalar_type() == tensors[i].scalar_type() &&
             message.tensors[0].device() == tensors[i].device();
    });
    Message& message = same == messages_.end() ? messages_.emplace_back() : *same;
    message.indices.push_back(i);
    message.tensors.push_back(tensors[i]);
  }
  for (Message& message : messages_) {
    message.average = group.all_reduce(pack(group, message.tensors), collective::kAvg);
  }
}

std::vector<at::Tensor> PackedAverages::wait() const {
  std::vector<at::Tensor> averages(count_);
  for (const Message& message : messages_) {
    const std::vector<at::Tensor> parts = parts_of(message.average.wait(), message.tensors);
    for (std::size_t i = 0; i < parts.size(); ++i) averages[message.indices[i]] = parts[i];
  }
  return averages;
}

}  // namespace torchspan::data_parallel
