#pragma once
#include <memory>
#include <optional>
#include <vector>

#include <torchspan/schedule.h>

namespace torchspan::pipeline {

/// Picks the next action of one worker in one step. The caller reports every action with became_ready(), and
/// runs the action that next() returns before it calls next() again. Used by the training thread.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual void became_ready(const schedule::Action& action) = 0;
  /// The action to run now; nullopt: no action is ready, or those that are must wait.
  virtual std::optional<schedule::Action> next() = 0;
  /// The next kBackward or kInputGradient, if it is known; idle time may recompute its forward.
  virtual std::optional<schedule::Action> next_backward() const = 0;
  /// A micro-batch left the pipeline without a backward.
  virtual void credit() {}
};

/// Follows one rank's row of a table, independent of the order of arrival.
std::unique_ptr<Policy> make_table_policy(std::vector<schedule::Action> row);

struct ArrivalLimits {
  int layer_range = -1;   ///< whose forwards start micro-batches; -1: not on this worker
  int max_in_flight = 0;  ///< 0: no limit
  bool backwards = true;  ///< the backward of that layer range ends a micro-batch; else credit() does
};
/// Follows the order in which actions become ready.
std::unique_ptr<Policy> make_arrival_policy(ArrivalLimits limits);

}  // namespace torchspan::pipeline
