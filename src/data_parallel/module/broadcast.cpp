#include "data_parallel/module/broadcast.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/data_parallel/reducer.h>

namespace torchspan::data_parallel {
namespace {

/// The tensor's memory without its version counter: autograd does not notice writes to it.
at::Tensor unseen(const at::Tensor& tensor) { return tensor.variable_data(); }

at::Tensor flat_copy(const collective::Group& group, const std::vector<at::Tensor>& tensors,
                     const std::vector<std::size_t>& chosen) {
  std::int64_t count = 0;
  for (const std::size_t i : chosen) count += tensors[i].numel();
  const at::Tensor& like = tensors[chosen[0]];
  at::Tensor flat = like.is_cpu() ? group.allocate({count}, like.scalar_type())
                                  : at::empty({count}, like.options().requires_grad(false));
  std::int64_t offset = 0;
  for (const std::size_t i : chosen) {
    flat.narrow(0, offset, tensors[i].numel()).view(tensors[i].sizes()).copy_(unseen(tensors[i]));
    offset += tensors[i].numel();
  }
  return flat;
}

}  // namespace

void broadcast_coalesced(const collective::Group& group, const std::vector<at::Tensor>& tensors, int root,
                         std::size_t chunk_bytes) {
  if (tensors.empty()) return;
  const at::NoGradGuard no_grad;
  const BucketAssignment chunks = compute_bucket_assignment_by_size(tensors, {chunk_bytes});
  std::vector<std::pair<at::Tensor, Future<at::Tensor>>> sent;
  for (const auto& chosen : chunks.buckets) {
    at::Tensor flat = flat_copy(group, tensors, chosen);
    sent.emplace_back(flat, group.broadcast(flat, root));
  }
  for (std::size_t chunk = 0; chunk < sent.size(); ++chunk) {
    sent[chunk].second.wait();
    if (group.rank() == root) continue;
    std::int64_t offset = 0;
    for (const std::size_t i : chunks.buckets[chunk]) {
      unseen(tensors[i])
          .copy_(sent[chunk].first.narrow(0, offset, tensors[i].numel()).view(tensors[i].sizes()));
      offset += tensors[i].numel();
    }
  }
}

}  // namespace torchspan::data_parallel
