#pragma once
#include <cstddef>
#include <exception>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/core/future.h>
#include <torchspan/data_parallel/options.h>

#include "sharded/parts.h"
#include "sharded/zero/gradient_scatter.h"

namespace torchspan::sharded {

/// The parameters of a reducer's buckets, each bucket in one flat tensor, and the gathers that bring the other ranks'
/// parts. Use it from the training thread.
class BucketParameters {
 public:
  /// Moves the parameters into the flat tensors.
  BucketParameters(collective::Group group, std::vector<BucketShards> layout,
                   const std::vector<data_parallel::Parameter>& parameters);
  BucketParameters(const BucketParameters&) = delete;
  BucketParameters& operator=(const BucketParameters&) = delete;

  /// Moves parameters that the program gave other memory, as torch::load() does, back into the flat tensors, with their
  /// new values, unless their shape, dtype or device has changed.
  void adopt();
  /// Throws Error{kInvalid} for a parameter that adopt() left out.
  void check() const;

  /// adopt(), and returns when all buckets are whole.
  void settle() {
    adopt();
    wait_all();
  }

  std::size_t size() const { return flats_.size(); }
  const at::Tensor& flat(std::size_t bucket) const { return flats_[bucket]; }
  /// Collective: begins to replace the other ranks' parts of a bucket by theirs.
  void begin_gather(std::size_t bucket);
  /// Returns when the bucket's parameters are whole. After a gather has failed, always throws its failure.
  void wait(std::size_t bucket);
  void wait_all();
  /// Number of buckets with a gather that was not waited for.
  std::size_t arriving() const;

 private:
  struct Held {
    data_parallel::Parameter parameter;
    at::Tensor view;  ///< its place in the flat tensor
    std::size_t bucket;
    bool fits() const;
  };
  struct Gather {
    PartGather parts;
    Future<at::Tensor> remainder;
  };

  const collective::Group group_;
  const std::vector<BucketShards> layout_;
  std::vector<at::Tensor> flats_;
  std::vector<Held> held_;
  std::vector<std::optional<Gather>> gathers_;  ///< by bucket
  std::exception_ptr failure_;
};

}  // namespace torchspan::sharded
