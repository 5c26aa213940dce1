#include "sharded/state/overlapping.h"

#include <algorithm>

namespace torchspan::sharded {
namespace {

struct Extent {
  const std::byte* begin;
  const std::byte* end;
  std::size_t index;
};

Extent extent_of(const at::Tensor& tensor, std::size_t index) {
  const auto* begin = static_cast<const std::byte*>(tensor.data_ptr());
  return {begin, begin + tensor.nbytes(), index};
}

}  // namespace

std::optional<std::pair<std::size_t, std::size_t>> overlapping(const std::vector<at::Tensor>& tensors) {
  std::vector<Extent> extents;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() > 0 && tensors[i].is_non_overlapping_and_dense() &&
        tensors[i].data_ptr() != nullptr)
      extents.push_back(extent_of(tensors[i], i));
  }
  std::ranges::sort(extents, {}, &Extent::begin);
  for (std::size_t i = 1; i < extents.size(); ++i) {
    // Without an earlier overlap, the last of them ends last.
    if (extents[i].begin < extents[i - 1].end) return std::minmax(extents[i - 1].index, extents[i].index);
  }
  return std::nullopt;
}

}  // namespace torchspan::sharded
