#include "state/api/place.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <functional>
#include <numeric>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/variable.h>

namespace torchspan::state {

bool fits(const Box& box, const Sizes& shape) {
  if (box.offset.size() != shape.size() || box.size.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (box.offset[d] < 0 || box.size[d] < 0 || box.offset[d] > shape[d] ||
        box.size[d] > shape[d] - box.offset[d]) {
      return false;
    }
  }
  return true;
}

std::string describe(const Sizes& sizes) { return fmt::format("[{}]", fmt::join(sizes, ", ")); }

std::string describe(const Box& box) {
  std::vector<std::string> ranges;
  for (std::size_t d = 0; d < box.offset.size(); ++d)
    ranges.push_back(fmt::format("{}:{}", box.offset[d], box.offset[d] + box.size[d]));
  return fmt::format("[{}]", fmt::join(ranges, ", "));
}

namespace {

/// A hook of a tensor that leaves gradients as they are and holds a place. All handles of a tensor share its hooks, which
/// stay when its data are replaced and when others are registered.
struct Note {
  PlacePtr place;
  template <class T>
  T operator()(const T&) const {
    return {};
  }
};

Note* note_of(const at::Tensor& tensor) {
  const auto* meta = tensor.defined() ? torch::autograd::impl::get_autograd_meta(tensor) : nullptr;
  if (meta == nullptr || !meta->cpp_hooks_list_) return nullptr;
  for (auto& hook : *meta->cpp_hooks_list_) {
    if (auto* note = hook.template target<Note>()) return note;
  }
  return nullptr;
}

std::int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

/// Appends the boxes of elements [begin, end) of the block at `offset` in dimensions < `dim`.
void append_boxes(std::vector<Box>& boxes, const Sizes& shape, Sizes offset, std::size_t dim,
                  std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  if (dim == shape.size()) {  // one element of a tensor with dimensions, or all of one without
    boxes.push_back({std::move(offset), Sizes(shape.size(), 1)});
    return;
  }
  std::int64_t row = 1;
  for (std::size_t i = dim + 1; i < shape.size(); ++i) row *= shape[i];
  const std::int64_t first = (begin + row - 1) / row, last = end / row;  // whole rows: [first, last)
  const auto part_of_row = [&](std::int64_t index, std::int64_t from, std::int64_t to) {
    Sizes inner = offset;
    inner[dim] = index;
    append_boxes(boxes, shape, std::move(inner), dim + 1, from, to);
  };
  if (first > last) return part_of_row(last, begin - last * row, end - last * row);
  if (begin < first * row) part_of_row(first - 1, begin - (first - 1) * row, row);
  if (first < last) {
    Box box{offset, Sizes(shape.size(), 1)};
    box.offset[dim] = first;
    box.size[dim] = last - first;
    for (std::size_t i = dim + 1; i < shape.size(); ++i) box.size[i] = shape[i];
    boxes.push_back(std::move(box));
  }
  if (last * row < end) part_of_row(last, 0, end - last * row);
}

}  // namespace

std::int64_t Place::count() const {
  std::int64_t count = 0;
  for (const Box& box : boxes) count += product(box.size);
  return count;
}

void set_place(const at::Tensor& tensor, PlacePtr place) {
  if (Note* note = note_of(tensor)) {
    note->place = std::move(place);
  } else if (place) {
    const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
    if (meta == nullptr || !meta->cpp_hooks_list_) torch::autograd::impl::create_cpp_hook(tensor);
    torch::autograd::impl::get_autograd_meta(tensor)->cpp_hooks_list_->emplace_back(Note{std::move(place)});
  }
}

void set_place(const at::Tensor& tensor, Place place) {
  const bool says_something = place.divided || place.own || place.repeated || place.same_as.defined() ||
                              !place.among.empty() || place.elements.defined();
  set_place(tensor, says_something ? std::make_shared<const Place>(std::move(place)) : nullptr);
}

PlacePtr place_of(const at::Tensor& tensor) {
  const Note* note = note_of(tensor);
  return note == nullptr ? nullptr : note->place;
}

Place part_of(Sizes shape, Sizes offset, Sizes size, RanksPtr among) {
  Place place{.divided = true, .shape = std::move(shape)};
  place.boxes.push_back({std::move(offset), std::move(size)});
  place.among.push_back(std::move(among));
  return place;
}

Place range_of(const PlacePtr& whole, const Sizes& sizes, std::int64_t begin, std::int64_t end,
               RanksPtr among) {
  Place place = whole ? *whole : Place();
  const std::vector<Box> outer =
      place.divided ? place.boxes : std::vector<Box>{{Sizes(sizes.size(), 0), sizes}};
  if (!place.divided) place.shape = sizes;
  place.divided = true;
  place.boxes.clear();
  std::int64_t first = 0;  // element of the box
  for (const Box& box : outer) {
    const std::int64_t count = product(box.size);
    for (Box& inner :
         boxes_of(box.size, std::max(begin - first, std::int64_t{0}), std::min(end - first, count))) {
      for (std::size_t i = 0; i < inner.offset.size(); ++i) inner.offset[i] += box.offset[i];
      place.boxes.push_back(std::move(inner));
    }
    first += count;
  }
  place.among.push_back(std::move(among));
  return place;
}

std::vector<Box> boxes_of(const Sizes& shape, std::int64_t begin, std::int64_t end) {
  std::vector<Box> boxes;
  append_boxes(boxes, shape, Sizes(shape.size(), 0), 0, begin, end);
  return boxes;
}

at::Tensor box_in(const at::Tensor& elements, const Place& place, std::size_t box) {
  const Sizes& size = place.boxes.at(box).size;
  if (place.boxes.size() == 1 && elements.sizes() == at::IntArrayRef(size)) return elements;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < box; ++i) begin += product(place.boxes[i].size);
  return elements.view({-1}).narrow(0, begin, product(size)).view(size);
}

}  // namespace torchspan::state
