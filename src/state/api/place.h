#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::state {

using Sizes = std::vector<std::int64_t>;

/// Part of a tensor: from `offset`, `size` elements in each dimension. The whole tensor has offset 0.
struct Box {
  Sizes offset;
  Sizes size;
  friend bool operator==(const Box&, const Box&) = default;
  friend auto operator<=>(const Box&, const Box&) = default;
};

/// Whether the box is within a tensor of this shape.
bool fits(const Box& box, const Sizes& shape);
/// "[2, 3]".
std::string describe(const Sizes& sizes);
/// "[0:2, 3:6]"; "[]" without dimensions.
std::string describe(const Box& box);

/// Ranks that hold different elements of a model.
class Ranks {
 public:
  virtual ~Ranks() = default;
  /// Equal for the same ranks of one process, such as two pipelines over the same workers: one reduction serves both.
  virtual const std::string& identity() const = 0;
  /// Numbers are reduced over ranks with a lower level first: those with a higher level may hold different tensors.
  virtual int level() const = 0;
  /// Of this process among them.
  virtual int rank() const = 0;
  /// Collective: replaces each number by the sum, or the maximum, of those of all ranks. NaN of any rank gives NaN.
  virtual void reduce(std::vector<double>& numbers, bool maximum) const = 0;
};
using RanksPtr = std::shared_ptr<const Ranks>;

/// Levels of Ranks::level().
inline constexpr int kTensorParallel = 0, kDataParallel = 1, kPipeline = 2;

/// Where a parameter or buffer, and what belongs to its elements (gradients, states of optimizers), is. A tensor without a
/// place is whole, and the same on all ranks that have it.
struct Place {
  /// The tensor has the elements `boxes` of one with this shape, one box after the other in row-major order. False: it is
  /// whole.
  bool divided = false;
  Sizes shape = {};
  std::vector<Box> boxes = {};
  bool own = false;  ///< other ranks have other values
  /// Another tensor with the same values counts instead of this one, for example the first copy of a tied parameter.
  bool repeated = false;
  /// A copy of the parameter that this rank also has: an optimizer's state of one is that of the other. Undefined: none.
  at::Tensor same_as = {};
  /// The ranks that have the other elements, or other tensors of the model.
  std::vector<RanksPtr> among = {};
  /// The elements of this rank, if the tensor itself is something else at times. Undefined: the tensor.
  at::Tensor elements = {};

  std::int64_t count() const;  ///< of the elements in `boxes`
};
using PlacePtr = std::shared_ptr<const Place>;

/// Sets the place of a parameter or buffer, which every handle of the tensor shares; null removes it. Moving or converting
/// the tensor keeps it, a copy has none. Call it on the thread that trains.
void set_place(const at::Tensor& tensor, PlacePtr place);
/// The same; removes a place that says nothing.
void set_place(const at::Tensor& tensor, Place place);
/// Null for a tensor without one.
PlacePtr place_of(const at::Tensor& tensor);

/// The place of a tensor with these sizes that begins at `offset` of one with `shape`.
Place part_of(Sizes shape, Sizes offset, Sizes size, RanksPtr among);
/// The place of the elements [begin, end), in row-major order, of a tensor with `sizes` that is at `whole` (null: it has no
/// place) and is now divided among more ranks.
Place range_of(const PlacePtr& whole, const Sizes& sizes, std::int64_t begin, std::int64_t end,
               RanksPtr among);

/// Divides the elements [begin, end) of a tensor into boxes of adjacent elements, in order: at most 2 * dimensions - 1.
std::vector<Box> boxes_of(const Sizes& shape, std::int64_t begin, std::int64_t end);
/// The elements of one box, as a view of `elements`, which has those of all boxes of the place.
at::Tensor box_in(const at::Tensor& elements, const Place& place, std::size_t box);

}  // namespace torchspan::state
