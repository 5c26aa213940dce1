#pragma once
#include <memory>
#include <optional>
#include <vector>

#include <torchspan/schedule.h>

namespace torchspan::pipeline {

struct LocalPipeline;
struct StepBegin;

/// The actions of one worker in one step: which are ready, which is next, how many are left. The caller reports every action
/// with became_ready(), and runs the action that next() returns before it calls next() again. Used by the training thread.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual void became_ready(schedule::Action action) = 0;
  /// The action to run now; nullopt: no action is ready, or those that are must wait.
  virtual std::optional<schedule::Action> next() = 0;
  /// The same, but a forward only if the worker, which holds the activations of `live` passes now, then holds at most what
  /// the schedule needs.
  virtual std::optional<schedule::Action> next_within(int live) = 0;
  /// The next kBackward or kInputGradient, if it is known and may run in this part of the step; idle time may recompute its
  /// forward.
  virtual std::optional<schedule::Action> next_backward() const = 0;
  /// Whether this part of the step has actions that next() has not returned.
  virtual bool any_left() const = 0;
  /// Begins the second part of a StepKind::kForward, which runs the backwards.
  virtual void begin_backwards() = 0;
  /// A micro-batch left the pipeline without a backward.
  virtual void credit() {}
};

/// The policy of a step on this worker. `table` is its schedule; null: order of arrival.
std::unique_ptr<Policy> make_policy(const LocalPipeline& local, const StepBegin& begin,
                                    const schedule::Table* table);

/// Follows one rank's row of a table, independent of the order of arrival. A kBackward that becomes ready stands for the
/// kInputGradient of the same micro-batch, if the row has one. In a step of two parts, the first one has the forwards.
std::unique_ptr<Policy> make_table_policy(std::vector<schedule::Action> row, bool two_parts = false);

struct ArrivalLimits {
  int layer_range = -1;    ///< whose forwards start micro-batches; -1: not on this worker
  int max_in_flight = 0;   ///< 0: no limit
  bool backwards = true;   ///< the backward of that layer range ends a micro-batch; else credit() does
  int actions = 0;         ///< of each part of the step, for any_left()
  bool two_parts = false;  ///< backwards run after begin_backwards()
};
/// Follows the order in which actions become ready.
std::unique_ptr<Policy> make_arrival_policy(ArrivalLimits limits);

}  // namespace torchspan::pipeline
