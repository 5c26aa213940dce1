#include "sharded/units/flat_layout.h"

#include <algorithm>
#include <utility>

namespace torchspan::sharded {

FlatLayout::FlatLayout(const std::vector<std::int64_t>& counts, const Terms& terms,
                       std::set<std::int64_t>& lengths)
    : ranks_(terms.ranks), segment_of_(counts.size()), offsets_(counts.size()) {
  const auto chunk_of = [&](std::int64_t count) {
    const std::int64_t unit = ranks_ * terms.step;
    return (count + unit - 1) / unit * terms.step;
  };
  Segment shared;
  std::int64_t small = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] >= terms.alone) {
      Segment segment;
      segment.chunk = chunk_of(counts[i]);
      segment.parameters = {i};
      append(std::move(segment));
      offsets_[i] = segments_.back().begin;
    } else {
      shared.parameters.push_back(i);
      offsets_[i] = small;
      small += counts[i];
    }
  }
  shared.chunk = std::max(chunk_of(small), terms.step);
  while (!lengths.insert(shared.chunk).second) shared.chunk += terms.step;
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
