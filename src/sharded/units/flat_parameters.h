#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>

#include "sharded/state/part_gather.h"
#include "sharded/units/buffer_pool.h"
#include "sharded/units/flat_layout.h"
#include "sharded/units/joined_parts.h"
#include "state/api/place.h"

namespace torchspan::sharded {

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
  at::Tensor full_;    ///< one storage for good, whose memory comes and goes: graphs may hold views of it
  at::Tensor memory_;  ///< of full_ while gathered or gathering
  at::Tensor whole_;   ///< all values in the parameters' own dtype, before divide() and after begin_whole()
  std::unique_ptr<JoinedParts> joined_;  ///< the memory of full_; null: it is copied there
  std::vector<PartGather> gathers_;
  Future<at::Tensor>
      others_ready_;  ///< in place of gathers_: the other ranks do not write to their parts any more
  bool gathered_ = false;
};

}  // namespace torchspan::sharded
