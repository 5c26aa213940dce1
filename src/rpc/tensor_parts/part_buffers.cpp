#include "rpc/tensor_parts/part_buffers.h"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>

namespace torchspan::rpc {

std::size_t HostBuffers::fill(const at::Tensor& tensor, std::size_t from) {
  const std::size_t count = std::min(ring_.part(), tensor.nbytes() - from);
  return ring_.fill(tensor, from, count) ? count : 0;
}

std::optional<Part> HostBuffers::take() {
  std::optional<Segment> segment = ring_.take();
  if (!segment) return std::nullopt;
  return Part{std::move(*segment)};
}

}  // namespace torchspan::rpc
