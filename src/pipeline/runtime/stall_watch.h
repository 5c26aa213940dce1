#pragma once
#include <optional>
#include <string>
#include <vector>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Looks after the others while this worker waits in a step: asks them from time to time what they do, and
/// finds out who keeps the step from going on. Used by the thread that trains.
class StallWatch {
 public:
  explicit StallWatch(const LocalPipeline& local) : local_(local), since_(local.executor().now()) {}

  /// Something came: the step goes on.
  void progress() {
    since_ = local_.executor().now();
    asked_.clear();
  }
  /// How long to wait for an event before look().
  Duration patience() const;
  /// Asks the others, or judges what they answered. Returns the error that ends the step once a worker has
  /// kept everybody waiting for longer than the stall time-out.
  std::optional<Error> look(std::uint64_t step, const std::string& waiting_for);

 private:
  struct Question {
    int worker = 0;
    Future<WorkerState> answer;
  };
  void ask(std::uint64_t step);

  const LocalPipeline& local_;
  TimePoint since_;
  std::vector<Question> asked_;
};

}  // namespace torchspan::pipeline
