#pragma once
#include <cstddef>
#include <functional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>

namespace torchspan::data_parallel {

/// Collective: overwrites `tensors`, which have the same shapes and dtypes on all ranks, with those of `root`.
/// Messages have one dtype and device and about `chunk_bytes`. Autograd does not notice: graphs that saved a
/// tensor stay usable. Blocks; begin_broadcast() does not, but the function that it returns does.
void broadcast_coalesced(const collective::Group& group, const std::vector<at::Tensor>& tensors, int root,
                         std::size_t chunk_bytes = std::size_t{32} << 20);
[[nodiscard]] std::function<void()> begin_broadcast(const collective::Group& group,
                                                    const std::vector<at::Tensor>& tensors, int root,
                                                    std::size_t chunk_bytes = std::size_t{32} << 20);

}  // namespace torchspan::data_parallel
