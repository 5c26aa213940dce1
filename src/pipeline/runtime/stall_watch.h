#pragma once
#include <optional>
#include <string>
#include <vector>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Asks the other workers for their state while this worker waits in a step, and detects the worker that
/// blocks the step. Used by the training thread.
class StallWatch {
 public:
  explicit StallWatch(const LocalPipeline& local) : local_(local), since_(local.executor().now()) {}

  /// Restarts the timeout: an event arrived or an action ended.
  void progress() {
    since_ = local_.executor().now();
    asked_.clear();
  }
  /// How long to wait for an event before look().
  Duration patience() const;
  /// Asks the other workers, or checks their answers. Returns the error that ends the step if a worker blocks
  /// the others for longer than PipelineOptions::stall_timeout.
  std::optional<Error> look(std::uint64_t step, const std::string& waiting_for);

 private:
  struct Question {
    std::string worker;
    std::uint32_t rank = 0;
    Future<WorkerState> answer;
  };
  void ask(std::uint64_t step);

  const LocalPipeline& local_;
  TimePoint since_;
  std::vector<Question> asked_;
};

}  // namespace torchspan::pipeline
