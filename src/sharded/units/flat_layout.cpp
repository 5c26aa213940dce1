#include "sharded/units/flat_layout.h"

#include <algorithm>
#include <utility>

namespace torchspan::sharded {

FlatLayout::FlatLayout(const std::vector<std::int64_t>& counts, int ranks, std::int64_t alone,
                       std::set<std::int64_t>& lengths)
    : ranks_(ranks), segment_of_(counts.size()), offsets_(counts.size()) {
  Segment shared;
  std::int64_t small = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] >= alone) {
      Segment segment;
      segment.chunk = (counts[i] + ranks_ - 1) / ranks_;
      segment.parameters = {i};
      append(std::move(segment));
      offsets_[i] = segments_.back().begin;
    } else {
      shared.parameters.push_back(i);
      offsets_[i] = small;
      small += counts[i];
    }
  }
  shared.chunk = std::max<std::int64_t>((small + ranks_ - 1) / ranks_, 1);
  while (!lengths.insert(shared.chunk).second) ++shared.chunk;
  append(std::move(shared));
  for (const std::size_t i : segments_.back().parameters) offsets_[i] += segments_.back().begin;
}

void FlatLayout::append(Segment segment) {
  segment.begin = size();
  segment.part = part_size_;
  part_size_ += segment.chunk;
  for (const std::size_t i : segment.parameters) segment_of_[i] = segments_.size();
  segments_.push_back(std::move(segment));
}

}  // namespace torchspan::sharded
