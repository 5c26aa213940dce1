#include "sharded/state/flat_ranges.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <set>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/accumulate.h>

#include <torchspan/core/error.h>

#include "sharded/state/entry_name.h"

namespace torchspan::sharded {
namespace {

/// Appends the boxes of elements [begin, end) of the block at `offset` in dimensions < `dim`, whose first element is
/// `base`.
void append_boxes(std::vector<AdjacentBox>& boxes, const Sizes& shape, Sizes offset, std::size_t dim,
                  std::int64_t base, std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  if (dim == shape.size()) {  // one element of a tensor with dimensions, or all of one without
    boxes.push_back({offset, Sizes(shape.size(), 1), base + begin, 1});
    return;
  }
  std::int64_t row = 1;
  for (std::size_t i = dim + 1; i < shape.size(); ++i) row *= shape[i];
  const std::int64_t first = (begin + row - 1) / row, last = end / row;  // whole rows: [first, last)
  const auto part_of_row = [&](std::int64_t index, std::int64_t from, std::int64_t to) {
    Sizes inner = offset;
    inner[dim] = index;
    append_boxes(boxes, shape, std::move(inner), dim + 1, base + index * row, from, to);
  };
  if (first > last) return part_of_row(last, begin - last * row, end - last * row);
  if (begin < first * row) part_of_row(first - 1, begin - (first - 1) * row, row);
  if (first < last) {
    AdjacentBox box{offset, Sizes(shape.size(), 1), base + first * row, (last - first) * row};
    box.offset[dim] = first;
    box.size[dim] = last - first;
    for (std::size_t i = dim + 1; i < shape.size(); ++i) box.size[i] = shape[i];
    boxes.push_back(std::move(box));
  }
  if (last * row < end) part_of_row(last, 0, end - last * row);
}

at::Tensor box_in(const at::Tensor& flat, const AdjacentBox& box, const FlatRange& range) {
  return flat.narrow(0, box.begin - range.begin, box.count).view(box.size);
}

class RangedOptimizerSource final : public checkpoint::StateSource {
 public:
  RangedOptimizerSource(optim::Optimizer& optimizer, RangeByOwner ranges,
                        std::vector<std::string> never_stepped)
      : optimizer_(optimizer), ranges_(std::move(ranges)), never_stepped_(std::move(never_stepped)) {}

  void save(checkpoint::StateWriter& writer) const override {
    for (const auto& item : optimizer_.state_view()) {
      const EntryName name(item.key());
      const auto range = ranges_.find(name.owner);
      const bool of_parameter = !name.parameter.empty();
      // Other ranks save what this one has no part of.
      if (of_parameter && (range == ranges_.end() || !range->second.is_saved())) continue;
      if (of_parameter) check_divisible(name, item, range->second);
      if (of_parameter && is_ranged(name, item.value(), range->second)) {
        save_range(writer, item.key(), item.value(), range->second);
      } else {
        writer.add(item.key(), item.value());
      }
    }
    for (const std::string& owner : never_stepped_)
      writer.add(owner + ".step", at::scalar_tensor(0, at::kLong));
  }

  void load(const checkpoint::StateReader& reader) override {
    std::set<std::string> mine;  // owners
    optim::StateDict state;
    for (const auto& item : optimizer_.state_view()) {
      const EntryName name(item.key());
      if (name.parameter.empty()) {
        state.insert(item.key(), reader.read(item.key()));
      } else {
        mine.insert(name.owner);
      }
    }
    for (const std::string& key : reader.names()) {
      const EntryName name(key);
      if (name.parameter.empty() || !mine.contains(name.owner)) continue;
      const auto range = ranges_.find(name.owner);
      if (range == ranges_.end() || name.entry == "step" || reader.shape(key) != range->second.shape) {
        state.insert(key, reader.read(key));
        continue;
      }
      const at::Tensor part = at::empty({range->second.count()}, reader.dtype_of(reader.full_name(key)));
      load_range(reader, key, part, range->second);
      state.insert(key, part);
    }
    for (const std::string& owner : mine) {
      // A placeholder for groups of which this rank has no elements.
      if (!ranges_.contains(owner) && state.find(owner + ".step") == nullptr)
        state.insert(owner + ".step", at::scalar_tensor(0, at::kLong));
    }
    optimizer_.load_state_dict(state);
  }

 private:
  static bool is_ranged(const EntryName& name, const at::Tensor& value, const FlatRange& range) {
    return name.entry != "step" && value.dim() == 1 && value.numel() == range.count();
  }

  /// Ranks would take a state of each other's elements for replicas of one.
  static void check_divisible(const EntryName& name, const optim::StateDict::Item& item,
                              const FlatRange& range) {
    const bool divided = range.count() < c10::multiply_integers(range.shape);
    if (!divided || name.entry == "step" || item.value().numel() == 1 || is_ranged(name, item.value(), range))
      return;
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format(
            "the optimizer's state '{}' cannot be saved in parts, because it does not have one number "
            "for each element of its parameter: complex parameters cannot be divided then",
            item.key()));
  }

  optim::Optimizer& optimizer_;
  const RangeByOwner ranges_;
  const std::vector<std::string> never_stepped_;
};

}  // namespace

std::vector<AdjacentBox> boxes_of(const FlatRange& range) {
  std::vector<AdjacentBox> boxes;
  append_boxes(boxes, range.shape, Sizes(range.shape.size(), 0), 0, 0, range.begin, range.end);
  return boxes;
}

void save_range(checkpoint::StateWriter& writer, const std::string& name, const at::Tensor& flat,
                const FlatRange& range) {
  if (range.of_nothing()) return writer.add(name, flat.view(range.shape));
  for (const AdjacentBox& box : boxes_of(range))
    writer.add_shard(name, box_in(flat, box, range), range.shape, box.offset);
}

void check_range(const checkpoint::StateReader& reader, const std::string& name, const at::Tensor& flat,
                 const FlatRange& range) {
  if (!reader.has(name))
    throw_invalid(fmt::format("the checkpoint has no tensor '{}'", reader.full_name(name)));
  if (reader.shape(name) == range.shape && reader.dtype_of(reader.full_name(name)) == flat.scalar_type())
    return;
  throw_invalid(fmt::format(
      "the tensor '{}' has shape [{}] and dtype {} in the checkpoint, but [{}] and {} in this program",
      reader.full_name(name), fmt::join(reader.shape(name), ", "),
      c10::toString(reader.dtype_of(reader.full_name(name))), fmt::join(range.shape, ", "),
      c10::toString(flat.scalar_type())));
}

void load_range(const checkpoint::StateReader& reader, const std::string& name, const at::Tensor& flat,
                const FlatRange& range) {
  check_range(reader, name, flat, range);
  for (const AdjacentBox& box : boxes_of(range))
    reader.read_shard_into(name, box_in(flat, box, range), box.offset);
}

checkpoint::SourcePtr ranged_optimizer_source(optim::Optimizer& optimizer, RangeByOwner ranges,
                                              std::vector<std::string> never_stepped) {
  return std::make_unique<RangedOptimizerSource>(optimizer, std::move(ranges), std::move(never_stepped));
}

}  // namespace torchspan::sharded
