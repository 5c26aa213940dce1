#pragma once
#include <memory>
#include <optional>
#include <vector>

#include <torchspan/schedule/schedule.h>

namespace torchspan::pipeline {

/// Picks the next action of one worker for one step. Told of every action once it can run; whoever asks next()
/// runs what it gets before asking again. Used by the thread that trains.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual void became_ready(const schedule::Action& action) = 0;
  /// Nothing: what can run now must wait, or nothing can.
  virtual std::optional<schedule::Action> next() = 0;
  /// The backward that comes after those that ran, if it is known: what idle time may prepare.
  virtual std::optional<schedule::Action> next_backward() const = 0;
  /// A micro-batch left the pipeline without a backward.
  virtual void credit() {}
};

/// The order of a table's row, whatever the order of arrival.
std::unique_ptr<Policy> make_table_policy(std::vector<schedule::Action> row);

struct ArrivalLimits {
  int layer_range = -1;   ///< whose forwards let micro-batches in; -1: not on this worker
  int max_in_flight = 0;  ///< 0: no limit
  bool backwards = true;  ///< the backward of that layer range lets the next one in; else credit() does
};
/// The order in which actions become ready.
std::unique_ptr<Policy> make_arrival_policy(ArrivalLimits limits);

}  // namespace torchspan::pipeline
