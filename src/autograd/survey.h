#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "autograd/messages.h"

namespace torchspan::autograd {

/// How far all workers of a pass say they are: as the text of an error, and as sums to compare. The workers
/// answer at different moments, so that one survey may show a rest that never was; of two in a row, between
/// which nothing changed, the second one's is true (Mattern's four counters, 1987).
struct Survey {
  Survey() = default;
  explicit Survey(const std::vector<PartReport>& parts);

  /// Whether the pass has stood still since `before`.
  bool stands_still_since(const Survey& before) const;
  /// The error of a FAST pass that stands still, to which `waiting` is added.
  const char* stall_advice() const;

  bool unanswered = false;  ///< whether a call whose arguments wait got no answer
  bool quiet = false;       ///< nobody works, nothing is under way, and somebody waits
  std::uint64_t executed = 0, sent = 0;
  std::string waiting;  ///< the sends without a gradient, a line each
  std::string at_work;  ///< who runs nodes or has messages without room, the same
};

}  // namespace torchspan::autograd
