#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/data_parallel/reducer.h>

namespace torchspan::data_parallel {

/// The memory in which gradients are reduced: flat buffers, and a view for each parameter of each replica.
/// A slot is replica · (number of parameters) + parameter. Different threads may fill different slots.
class Buckets {
 public:
  /// Buffers come from `group`, so that its ranks may share them.
  Buckets(const std::vector<std::vector<Parameter>>& replicas, const BucketAssignment& assignment,
          const collective::Group& group);

  std::size_t size() const { return buckets_.size(); }
  /// Parameters of a bucket, in the order of its buffer.
  const std::vector<std::size_t>& parameters(std::size_t bucket) const { return buckets_[bucket].parameters; }
  bool sparse(std::size_t bucket) const { return buckets_[bucket].sparse; }
  /// The first replica's buffer; dense buckets only.
  const at::Tensor& buffer(std::size_t bucket) const { return buckets_[bucket].buffers[0]; }
  at::ScalarType dtype(std::size_t bucket) const { return buckets_[bucket].dtype; }
  std::size_t bytes(std::size_t bucket) const { return buckets_[bucket].bytes; }
  std::size_t bucket_of(std::size_t slot) const { return bucket_of_[slot % bucket_of_.size()]; }

  /// The slot's part of its buffer; for a sparse gradient, the one that was put last.
  const at::Tensor& view(std::size_t slot) const { return views_[slot]; }
  /// Whether `gradient` is the slot's view, in memory and shape.
  bool holds(std::size_t slot, const at::Tensor& gradient) const;
  /// Whether the slot's parameter still has the shape, dtype and device for which the buckets were made.
  bool fits(std::size_t slot) const;
  /// Throws Error{kInvalid} for a dense gradient in a sparse bucket and vice versa, and for another shape or dtype.
  void check(std::size_t slot, const at::Tensor& gradient) const;
  /// Sets the slot's part to factor · gradient, or to zero for an undefined gradient. True if the gradient
  /// is the slot's view. Throws what check() throws.
  bool put(std::size_t slot, const at::Tensor& gradient, double factor);
  void put_nothing(std::size_t slot);

  /// Returns the sum over replicas, which is to be reduced.
  at::Tensor outgoing(std::size_t bucket);
  /// Writes the reduced bucket, which may be the buffer itself, to all replicas.
  void take(std::size_t bucket, const at::Tensor& reduced);

 private:
  struct Bucket {
    std::vector<std::size_t> parameters;
    std::vector<at::Tensor> buffers;  // by replica; none when sparse
    bool sparse = false;
    at::ScalarType dtype = at::kFloat;
    std::size_t bytes = 0;
  };
  void add(const std::vector<std::vector<Parameter>>& replicas, const std::vector<std::size_t>& parameters,
           const collective::Group& group);

  std::vector<Bucket> buckets_;
  std::vector<std::size_t> bucket_of_;  // by parameter
  std::vector<at::Tensor> views_;       // by slot
  std::vector<at::Tensor> likes_;       // by slot: the parameters, for the shape of empty sparse gradients
  std::size_t replicas_;
};

/// Buckets of the sizes that the options give, whose parameters follow `order`.
std::shared_ptr<Buckets> build_buckets(const Reducer::Replicas& replicas, const DataParallelOptions& options,
                                       const collective::Group& group, const std::vector<std::size_t>& order);

}  // namespace torchspan::data_parallel
