#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/data_parallel/options.h>

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

}  // namespace torchspan::sharded
