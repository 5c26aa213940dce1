#include "collective/coalesced.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "collective/tensors.h"

namespace torchspan::collective {

std::string_view name_of(CoalescedCall::Verb verb) {
  switch (verb) {
    case CoalescedCall::Verb::kAllReduce:
      return "all_reduce_coalesced";
    case CoalescedCall::Verb::kReduceScatter:
      return "reduce_scatter_coalesced";
    case CoalescedCall::Verb::kAllGather:
      return "all_gather_into_tensor_coalesced";
  }
  return "an unknown operation";
}

std::string shapes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::string> shapes;
  for (const at::Tensor& tensor : tensors) {
    shapes.push_back(fmt::format("[{}]", fmt::join(tensor.sizes().vec(), ", ")));
  }
  return fmt::format("{}", fmt::join(shapes, ", "));
}

at::Tensor join_rows(const std::vector<at::Tensor>& tensors, std::int64_t rows) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) {
    parts.push_back(plain(tensor).view({rows, tensor.numel() / rows}));
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, 1);
}

std::vector<at::Tensor> cut_row(const at::Tensor& row, const std::vector<std::vector<std::int64_t>>& sizes) {
  std::vector<at::Tensor> parts;
  std::int64_t at = 0;
  for (const std::vector<std::int64_t>& shape : sizes) {
    const std::int64_t count = c10::multiply_integers(shape);
    parts.push_back(row.narrow(0, at, count).view(shape));
    at += count;
  }
  return parts;
}

}  // namespace torchspan::collective
