#include "pipeline/runtime/value_of_first.h"

#include <algorithm>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "pipeline/runtime/all_gather_text.h"

namespace torchspan::pipeline {
namespace {

/// Limit of each exchange.
constexpr Duration kValueTimeout = std::chrono::minutes(5);

}  // namespace

at::Tensor value_of_first(const Worker& worker, const std::vector<std::string>& workers,
                          const at::Tensor& tensor, const std::string& what) {
  const torch::autograd::AutoGradMode no_grad(false);
  const at::Tensor value = tensor.detach().cpu().contiguous().clone();
  if (workers.size() <= 1) return value;
  auto* const data = static_cast<std::byte*>(value.data_ptr());
  const bool sends = workers.front() == worker.name();
  const std::size_t total = value.nbytes();
  for (std::size_t begin = 0; begin < total; begin += kMostBytes) {
    std::byte* const from = data + begin;
    const std::size_t size = std::min(kMostBytes, total - begin);
    const auto all =
        worker.all_gather_bytes(sends ? Bytes(from, from + size) : Bytes(), workers, kValueTimeout);
    if (all.front().size() != size) {
      throw Error(ErrorKind::kInvalid, fmt::format("worker '{}' sent {} bytes instead of {} for {}",
                                                   workers.front(), all.front().size(), size, what))
          .with_worker(workers.front());
    }
    std::copy(all.front().begin(), all.front().end(), from);
  }
  return value;
}

}  // namespace torchspan::pipeline
