#include "checkpoint/files/boxes.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace torchspan::checkpoint {

Box whole_box(const Sizes& shape) { return {Sizes(shape.size(), 0), shape}; }

std::optional<std::int64_t> element_count(const Sizes& shape) {
  std::int64_t count = 1;
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(count, size, &count)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : count;
}

std::optional<Box> intersection(const Box& a, const Box& b) {
  if (a.offset.size() != b.offset.size()) return std::nullopt;
  Box common;
  for (std::size_t d = 0; d < a.offset.size(); ++d) {
    const std::int64_t begin = std::max(a.offset[d], b.offset[d]);
    const std::int64_t end = std::min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]);
    if (begin >= end) return std::nullopt;
    common.offset.push_back(begin);
    common.size.push_back(end - begin);
  }
  return common;
}

std::string coverage_fault(const Box& wanted, const std::vector<Box>& boxes) {
  std::int64_t left = element_count(wanted.size).value_or(0);
  std::vector<Box> parts;
  for (const Box& box : boxes) {
    const std::optional<Box> part = intersection(wanted, box);
    if (!part) continue;
    parts.push_back(*part);
  }
  std::sort(parts.begin(), parts.end());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (std::size_t j = i + 1; j < parts.size(); ++j) {
      // Sorted by the first dimension: later boxes begin behind this one.
      if (!parts[i].offset.empty() && parts[j].offset[0] >= parts[i].offset[0] + parts[i].size[0]) break;
      if (intersection(parts[i], parts[j]))
        return fmt::format("parts {} and {} overlap", describe(parts[i]), describe(parts[j]));
    }
  }
  // Disjoint parts, so they have no more elements than the box.
  for (const Box& part : parts) left -= *element_count(part.size);
  if (left != 0) return fmt::format("{} of the elements of {} are in no part", left, describe(wanted));
  return {};
}

}  // namespace torchspan::checkpoint
