#pragma once
#include <cstddef>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::data_parallel {

/// Which gradients travel together.
struct BucketAssignment {
  std::vector<std::vector<std::size_t>> buckets;  ///< indices into the tensors, bucket by bucket
  std::vector<std::size_t>
      limits;  ///< bytes at which each bucket was closed or would be; 0: sparse, no limit
};

struct AssignmentOptions {
  std::vector<bool> sparse = {};  ///< whether each tensor's gradient is sparse; empty: none is
  /// The order in which tensors are taken, each index once; buckets then stand in the order in which they
  /// were filled. Empty: as given, and buckets are sorted by their smallest index.
  std::vector<std::size_t> order = {};
};

/// Puts tensors into buckets of one dtype and device. A tensor is added to the open bucket of its kind, which
/// is closed as soon as it holds at least the limit; the n-th bucket of a kind has the n-th of `limits`
/// (bytes, at least one of them), those after the last have the last. Tensors are never split, and a sparse
/// one has a bucket of its own. The same everywhere for the same arguments. Throws Error{kInvalid} when there
/// are no tensors, no limits, or the options do not fit them.
BucketAssignment compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<std::size_t>& limits,
                                                   const AssignmentOptions& options = {});

}  // namespace torchspan::data_parallel
