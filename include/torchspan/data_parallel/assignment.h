#pragma once
#include <cstddef>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::data_parallel {

/// Assignment of gradients to the buckets in which they are reduced together.
struct BucketAssignment {
  std::vector<std::vector<std::size_t>> buckets;  ///< tensor indices, by bucket
  std::vector<std::size_t> limits;                ///< bytes at which a bucket closes; 0: sparse, no limit
};

struct AssignmentOptions {
  std::vector<bool> sparse = {};  ///< whether each tensor's gradient is sparse; empty: none
  /// Order in which tensors are assigned, each index once; buckets keep the order in which they were
  /// opened. Empty: the given order, with buckets sorted by smallest index.
  std::vector<std::size_t> order = {};
};

/// Assigns tensors to buckets of one dtype and device. A bucket closes when it holds at least its limit in
/// bytes; the n-th bucket of a dtype and device uses limits[n], later ones the last limit. Tensors are
/// never split; a sparse one gets a bucket to itself. Deterministic: equal arguments give equal buckets on
/// all ranks. Throws Error{kInvalid} for no tensors, no limits, or options that do not match the tensors.
BucketAssignment compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<std::size_t>& limits,
                                                   const AssignmentOptions& options = {});

}  // namespace torchspan::data_parallel
