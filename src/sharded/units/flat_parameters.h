#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>

#include "sharded/state/flat_ranges.h"
#include "sharded/state/part_gather.h"
#include "sharded/units/buffer_pool.h"

namespace torchspan::sharded {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

/// Parameters of one unit that share a dtype and whether they are trained, as one flat tensor of which each rank
/// keeps an equal part. Outside of a gather, each parameter is the part of it that this rank keeps, a tensor of one
/// dimension. Gathered, it is the whole parameter. The parameters remain the same at::Tensor objects.
class FlatParameters {
 public:
  struct Entry {
    std::string name;
    at::Tensor tensor;
    FlatRange range;          ///< elements of the parameter on this rank
    std::int64_t offset = 0;  ///< of the parameter in the flat tensor
    at::Tensor full, part;    ///< what the parameter is set to
  };

  /// Takes the values of the parameters. `chunk`: elements of a rank's part; at least needed_chunk().
  FlatParameters(const std::vector<NamedParameter>& parameters, const collective::Group& group,
                 std::shared_ptr<BufferPool> pool, std::int64_t chunk);
  FlatParameters(const FlatParameters&) = delete;
  FlatParameters& operator=(const FlatParameters&) = delete;
  static std::int64_t needed_chunk(const std::vector<NamedParameter>& parameters, int ranks);

  /// Collective: replaces the values with rank 0's.
  void broadcast();
  /// Frees the other ranks' parts; afterwards the parameters are parts.
  void free();
  /// Issues the operations of a gather unless it is gathered. Throws Error{kInvalid} that names a parameter whose
  /// memory, shape or dtype was changed.
  void begin_gather();
  void end_gather();
  /// Writes this rank's part of the gathered parameters to the part that stays.
  void keep_changes();
  bool is_gathered() const { return gathered_; }

  const std::vector<Entry>& entries() const { return entries_; }
  bool trained() const { return entries_[0].tensor.requires_grad(); }
  std::int64_t chunk() const { return chunk_; }
  std::int64_t size() const { return chunk_ * group_.size(); }
  const collective::Group& group() const { return group_; }
  BufferPool& pool() const { return *pool_; }
  const at::Tensor& part() const { return part_; }

 private:
  void check_unchanged() const;
  void set_memory(at::Tensor memory);

  const collective::Group group_;
  const std::shared_ptr<BufferPool> pool_;
  const std::int64_t chunk_;
  std::vector<Entry> entries_;
  at::Tensor part_;    ///< this rank's part, of `chunk_` elements
  at::Tensor full_;    ///< one storage for good, whose memory comes and goes: graphs may hold views of it
  at::Tensor memory_;  ///< of full_ while gathered or gathering
  PartGather gather_;
  bool gathered_ = true;
};

}  // namespace torchspan::sharded
