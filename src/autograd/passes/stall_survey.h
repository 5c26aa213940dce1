#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "autograd/messages/messages.h"

namespace torchspan::autograd {

/// The progress of a pass on all workers: as the text of an error, and as sums to compare. The workers answer
/// at different moments, so one survey may show a pause that never existed; if nothing changed between two
/// surveys, the second one is correct (Mattern's four counters, 1987).
struct StallSurvey {
  StallSurvey() = default;
  explicit StallSurvey(const std::vector<PartReport>& parts);

  /// Whether the pass has made no progress since `before` and cannot make any.
  bool is_stalled_since(const StallSurvey& before) const;
  /// The error text for a stalled FAST pass; `waiting` is appended to it.
  const char* stall_advice() const;

  bool unanswered = false;  ///< a call whose arguments wait for gradients has no result
  bool quiet = false;       ///< no worker runs nodes, no message is in flight, and some send waits
  std::uint64_t executed = 0, sent = 0;
  std::string waiting;  ///< one line for each send without a gradient
  std::string at_work;  ///< one line for each worker that runs nodes or has queued messages
};

}  // namespace torchspan::autograd
