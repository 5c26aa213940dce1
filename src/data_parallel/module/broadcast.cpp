#include "data_parallel/module/broadcast.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/data_parallel/reducer.h>

#include "device/api/compat.h"

namespace torchspan::data_parallel {
namespace {

/// The tensor's memory without its version counter: autograd does not notice writes to it.
at::Tensor unseen(const at::Tensor& tensor) { return tensor.variable_data(); }

/// One operation for all tensors: on a device, an operation for each would cost more than the copy.
at::Tensor flat_copy(const collective::Group& group, const std::vector<at::Tensor>& tensors,
                     const std::vector<std::size_t>& chosen) {
  std::int64_t count = 0;
  std::vector<at::Tensor> rows;
  rows.reserve(chosen.size());
  for (const std::size_t i : chosen) {
    rows.push_back(unseen(tensors[i]).reshape({-1}));
    count += tensors[i].numel();
  }
  const at::Tensor& like = tensors[chosen[0]];
  at::Tensor flat = like.is_cpu() ? group.allocate({count}, like.scalar_type())
                                  : at::empty({count}, like.options().requires_grad(false));
  return at::cat_out(flat, rows);
}

/// Copies the parts of `flat` into the tensors.
void copy_parts(const at::Tensor& flat, const std::vector<at::Tensor>& tensors,
                const std::vector<std::size_t>& chosen) {
  std::vector<at::Tensor> targets, parts;
  std::int64_t offset = 0;
  for (const std::size_t i : chosen) {
    targets.push_back(unseen(tensors[i]));
    parts.push_back(flat.narrow(0, offset, tensors[i].numel()).view(tensors[i].sizes()));
    offset += tensors[i].numel();
  }
  device::compat::copy_all(targets, parts);
}

}  // namespace

std::function<void()> begin_broadcast(const collective::Group& group, const std::vector<at::Tensor>& tensors,
                                      int root, std::size_t chunk_bytes) {
  if (tensors.empty() || group.size() == 1) return [] {};
  const at::NoGradGuard no_grad;
  const BucketAssignment chunks = compute_bucket_assignment_by_size(tensors, {chunk_bytes});
  std::vector<std::pair<at::Tensor, Future<at::Tensor>>> sent;
  for (const auto& chosen : chunks.buckets) {
    at::Tensor flat = flat_copy(group, tensors, chosen);
    sent.emplace_back(flat, group.broadcast(flat, root));
  }
  return [sent, tensors, chosen = chunks.buckets, receives = group.rank() != root] {
    const at::NoGradGuard no_grad;
    for (std::size_t chunk = 0; chunk < sent.size(); ++chunk) {
      sent[chunk].second.wait();
      if (receives) copy_parts(sent[chunk].first, tensors, chosen[chunk]);
    }
  };
}

void broadcast_coalesced(const collective::Group& group, const std::vector<at::Tensor>& tensors, int root,
                         std::size_t chunk_bytes) {
  begin_broadcast(group, tensors, root, chunk_bytes)();
}

}  // namespace torchspan::data_parallel
