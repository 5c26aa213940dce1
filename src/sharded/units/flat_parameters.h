#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/detail/core/mutex.h>

#include "sharded/parts.h"
#include "state/api/place.h"

namespace torchspan::sharded {

/// Flat tensors for gathered units, used again instead of freed, because fresh pages are slow. All of them together
/// never take more memory than the largest number of them that was in use. Also counts gradients. Thread-safe.
class BufferPool {
 public:
  /// A tensor of `count` elements with any content.
  at::Tensor take(std::int64_t count, const at::TensorOptions& options);
  void give(at::Tensor buffer);
  /// Frees what is not taken, and forgets how much was in use.
  void clear();
  /// Counts memory from elsewhere as taken, until drop().
  void count(std::size_t bytes);
  void drop(std::size_t bytes);
  /// Largest number of bytes that were taken or counted at the same time.
  std::size_t peak_bytes() const;

 private:
  /// Moves the oldest spare tensors to `dropped` until the rest fits; the caller frees them without the lock.
  void trim(std::vector<at::Tensor>& dropped) TORCHSPAN_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::vector<at::Tensor> spare_ TORCHSPAN_GUARDED_BY(mutex_);  // the oldest first
  std::size_t spare_bytes_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t taken_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t most_taken_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t counted_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t peak_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

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

/// The parts of all ranks as the flat tensor that they are parts of: read-only views of the memory in which each rank
/// keeps its part, at adjacent addresses, without a copy.
class JoinedParts {
 public:
  /// Elements of `dtype` in a page, to which the chunks of a layout must be rounded; 0 if ranks of the group cannot map
  /// each other's memory.
  static std::int64_t step(const collective::Group& group, at::ScalarType dtype);
  /// Collective. Null on all ranks if one of them cannot map all parts.
  static std::unique_ptr<JoinedParts> make(const collective::Group& group, const at::Tensor& part,
                                           const FlatLayout& layout);
  ~JoinedParts();
  JoinedParts(const JoinedParts&) = delete;
  JoinedParts& operator=(const JoinedParts&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// What was read no longer counts as memory of this process until it is read again.
  void forget() const;

 private:
  JoinedParts() = default;
  bool map(const std::vector<std::byte*>& parts, std::size_t item, const FlatLayout& layout);

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

/// Parameters of one unit that share a dtype and whether they are trained, as one flat tensor of which each rank
/// keeps an equal part. Outside of a gather, each parameter is the part of it that this rank keeps, a tensor of one
/// dimension. Gathered, it is the whole parameter, in the dtype of computations. The parameters remain the same
/// at::Tensor objects.
class FlatParameters {
 public:
  struct Entry {
    std::string name;
    at::Tensor tensor;
    at::Tensor full, part;  ///< what the parameter is set to
  };

  struct Terms {
    collective::Group group;
    std::shared_ptr<BufferPool> pool;
    at::ScalarType compute;  ///< of gathered parameters
    bool maps = false;       ///< ranks shall read each other's parts in place; needs a layout of pages
  };

  /// Takes the values of the parameters, which become parts. divide() must follow.
  FlatParameters(const std::vector<NamedParameter>& parameters, FlatLayout layout, Terms terms);
  FlatParameters(const FlatParameters&) = delete;
  FlatParameters& operator=(const FlatParameters&) = delete;

  /// Keeps this rank's part of the values: of those of the group's rank 0, or of this rank's if null. Collective.
  void divide(const collective::Group* from);
  /// Frees the other ranks' parts; afterwards the parameters are parts.
  void free();
  /// Issues the operations of a gather unless it is gathered. Throws Error{kInvalid} that names a parameter whose
  /// memory, shape or dtype was changed.
  void begin_gather();
  void end_gather();
  bool is_gathered() const { return gathered_; }
  /// Whether `tensor` is in the memory of the gathered parameters, or of the whole ones after begin_whole().
  bool holds(const at::Tensor& tensor) const;
  /// Between begin_gather() and end_gather().
  bool is_gathering() const { return !gathers_.empty() || others_ready_.valid(); }
  /// Null unless ranks read each other's parts in place.
  const JoinedParts* joined() const { return joined_.get(); }
  /// Collective: the parameters are whole in their own dtype until end_whole(), which keeps the changes of this rank's
  /// part. Parameters that are computed with in another dtype must not be gathered in between.
  void begin_whole();
  void end_whole();

  /// Names a parameter; returns whether it is one of these.
  bool set_name(const at::Tensor& parameter, const std::string& name);
  const std::vector<Entry>& entries() const { return entries_; }
  const FlatLayout& layout() const { return layout_; }
  bool trained() const { return entries_[0].tensor.requires_grad(); }
  const collective::Group& group() const { return group_; }
  const at::Tensor& part() const { return part_; }

 private:
  void add(const NamedParameter& parameter);
  bool converts() const { return full_.scalar_type() != part_.scalar_type(); }
  void check_unchanged() const;
  void set_memory(at::Tensor memory);
  /// Issues a gather of all parts into `flat`.
  std::vector<PartGather> gather_into(const at::Tensor& flat) const;
  /// Writes this rank's part of `flat` to the part that stays.
  void keep(const at::Tensor& flat);
  /// This rank's chunk of a segment, in a flat tensor and in the part.
  at::Tensor own_chunk(const at::Tensor& flat, const Segment& segment) const;
  at::Tensor in_part(const Segment& segment) const;

  const FlatLayout layout_;
  const collective::Group group_;
  const state::RanksPtr ranks_;
  const std::shared_ptr<BufferPool> pool_;
  const bool maps_;
  std::vector<Entry> entries_;
  at::Tensor
      part_;  ///< this rank's chunks of all segments, in memory that the other ranks read if there is any
  at::Tensor full_;    ///< one storage, whose memory is allocated and freed: graphs may hold views of it
  at::Tensor memory_;  ///< of full_ while gathered or gathering
  at::Tensor whole_;   ///< all values in the parameters' own dtype, before divide() and after begin_whole()
  std::unique_ptr<JoinedParts> joined_;  ///< the memory of full_; null: it is copied there
  std::vector<PartGather> gathers_;
  Future<at::Tensor>
      others_ready_;  ///< in place of gathers_: the other ranks do not write to their parts any more
  bool gathered_ = false;
};

}  // namespace torchspan::sharded
