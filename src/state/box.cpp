#include "state/api/box.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

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

}  // namespace torchspan::state
