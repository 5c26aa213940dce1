#pragma once
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

namespace torchspan::sharded {

/// Adjacent elements of a flat tensor, of which each rank keeps an equal chunk.
struct Segment {
  std::int64_t begin = 0;               ///< in the flat tensor; rank r's chunk begins at begin + r * chunk
  std::int64_t chunk = 0;               ///< elements of one rank
  std::int64_t part = 0;                ///< where the chunk begins in a rank's part of the flat tensor
  std::vector<std::size_t> parameters;  ///< indices, in order, without gaps between them
};

/// Where parameters are in a flat tensor: large ones have a segment each, the others share the last one.
class FlatLayout {
 public:
  struct Terms {
    int ranks;
    std::int64_t alone;     ///< parameters of at least this many elements have their own segment
    std::int64_t step = 1;  ///< of which the lengths of chunks are multiples
  };
  /// `counts`: elements of the parameters. The chunk of the shared segment, which always exists, is not in `lengths`, to
  /// which it is added.
  FlatLayout(const std::vector<std::int64_t>& counts, const Terms& terms, std::set<std::int64_t>& lengths);

  const std::vector<Segment>& segments() const { return segments_; }
  /// The segment of small parameters, perhaps of none.
  std::size_t shared() const { return segments_.size() - 1; }
  std::size_t segment_of(std::size_t parameter) const { return segment_of_[parameter]; }
  /// Where the parameter begins in the flat tensor.
  std::int64_t offset(std::size_t parameter) const { return offsets_[parameter]; }
  /// Elements of the flat tensor, and of one rank's part of it.
  std::int64_t size() const { return part_size_ * ranks_; }
  std::int64_t part_size() const { return part_size_; }

 private:
  void append(Segment segment);

  std::int64_t ranks_;
  std::int64_t part_size_ = 0;
  std::vector<Segment> segments_;
  std::vector<std::size_t> segment_of_;
  std::vector<std::int64_t> offsets_;
};

}  // namespace torchspan::sharded
