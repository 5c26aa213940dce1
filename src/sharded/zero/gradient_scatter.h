#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/future.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan::sharded {

/// One bucket of a reducer, divided among the ranks: rank r owns `chunk` elements from r * chunk, the last rank
/// also the remainder.
struct BucketShards {
  struct Place {
    std::size_t parameter;
    std::int64_t offset, count;  ///< in the bucket, in elements
  };
  /// The part of a parameter that a rank owns: elements of the parameter, in row-major order.
  struct Piece {
    std::size_t parameter;
    std::int64_t begin, end;
    std::int64_t offset;  ///< of `begin` in the bucket
  };

  std::vector<Place> places;
  std::int64_t count = 0;
  std::int64_t chunk = 0;
  int ranks = 1;

  std::int64_t begin(int rank) const { return rank * chunk; }
  std::int64_t end(int rank) const { return rank + 1 == ranks ? count : (rank + 1) * chunk; }
  std::int64_t remainder() const { return count - ranks * chunk; }
  std::vector<Piece> pieces(int rank) const;
};

/// Divides buckets, given as parameter names in the order of their memory. Throws Error{kInvalid} for an unknown
/// name.
std::vector<BucketShards> shards_of(const std::vector<std::vector<std::string>>& buckets,
                                    const std::vector<data_parallel::Parameter>& parameters, int ranks);

/// A communication hook that reduce-scatters each bucket in place: afterwards this rank's part of a bucket holds
/// averages, and the rest this rank's own gradients, or nothing if they are divided. Thread-safe.
class GradientScatter final : public std::enable_shared_from_this<GradientScatter> {
 public:
  /// `divides`: the memory of the rest of a bucket is released until the next backward pass writes to it.
  GradientScatter(std::vector<BucketShards> layout, bool divides)
      : layout_(std::move(layout)), divides_(divides), buffers_(layout_.size()) {}
  GradientScatter(const GradientScatter&) = delete;
  GradientScatter& operator=(const GradientScatter&) = delete;

  const std::vector<BucketShards>& layout() const { return layout_; }
  /// Fails after the operations if gradients of the last reduction are neither stepped nor cleared: outside of
  /// this rank's parts they are no averages, so nothing may be added to them.
  Future<at::Tensor> reduce(const data_parallel::GradientBucket& bucket, const collective::Group& group);
  /// The last reduction's memory of a bucket; undefined before the first.
  at::Tensor buffer(std::size_t bucket) const;
  /// Number of reductions of this rank's passes that have begun since the last clear(), also those that failed. Buckets are
  /// reduced in order.
  std::uint64_t begun() const;
  void clear();
  /// From now on buckets are all-reduced: there is no optimizer for the parts.
  void close();

 private:
  const std::vector<BucketShards> layout_;
  const bool divides_;
  mutable Mutex mutex_;
  std::vector<at::Tensor> buffers_ TORCHSPAN_GUARDED_BY(mutex_);  // by bucket
  bool closed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::uint64_t begun_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchspan::sharded
