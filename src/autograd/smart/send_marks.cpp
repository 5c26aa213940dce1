#include "autograd/smart/send_marks.h"

#include <algorithm>

namespace torchspan::autograd {

bool SendMarks::deliver(const std::vector<std::uint8_t>& reached) {
  if (std::exchange(has_gradients_, true)) return false;
  for (std::uint32_t output = 0; output < reached.size(); ++output) {
    if (reached[output] != 0) delivered_.insert(output);
  }
  return true;
}

bool SendMarks::agree() const {
  return std::includes(marked_.begin(), marked_.end(), delivered_.begin(), delivered_.end());
}

}  // namespace torchspan::autograd
