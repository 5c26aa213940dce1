#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/checkpoint/sources.h>
#include <torchspan/checkpoint/state.h>
#include <torchspan/optim/optimizer.h>

namespace torchspan::sharded {

using Sizes = std::vector<std::int64_t>;

/// The elements [begin, end) of a tensor in row-major order.
struct FlatRange {
  Sizes shape;  ///< of the whole tensor
  std::int64_t begin = 0, end = 0;
  std::int64_t count() const { return end - begin; }
  /// Whether the tensor has no elements at all; every rank saves it then.
  bool of_nothing() const { return std::find(shape.begin(), shape.end(), 0) != shape.end(); }
  bool is_saved() const { return count() > 0 || of_nothing(); }
};

/// A box of a tensor whose elements are adjacent in row-major order.
struct AdjacentBox {
  Sizes offset, size;
  std::int64_t begin, count;  ///< elements of the tensor
};

/// Divides a range into boxes, in order: at most 2 * dimensions - 1.
std::vector<AdjacentBox> boxes_of(const FlatRange& range);

/// Saves and loads `flat`, which holds the elements of the range. A rank saves a range if is_saved().
void save_range(checkpoint::StateWriter& writer, const std::string& name, const at::Tensor& flat,
                const FlatRange& range);
void load_range(const checkpoint::StateReader& reader, const std::string& name, const at::Tensor& flat,
                const FlatRange& range);
/// Throws Error{kInvalid} unless the reader has the tensor with this shape and dtype.
void check_range(const checkpoint::StateReader& reader, const std::string& name, const at::Tensor& flat,
                 const FlatRange& range);

/// The ranges of an optimizer's parameters, by EntryName::owner.
using RangeByOwner = std::map<std::string, FlatRange>;

/// The state of an optimizer whose parameters are ranges of tensors: saved under the names and shapes that an optimizer of
/// the whole tensors would have. `never_stepped`: owners that only that one has; they are saved without state.
checkpoint::SourcePtr ranged_optimizer_source(optim::Optimizer& optimizer, RangeByOwner ranges,
                                              std::vector<std::string> never_stepped = {});

}  // namespace torchspan::sharded
