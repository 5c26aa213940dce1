#pragma once
#include <string>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// The step was ended by another worker, which has told everybody.
class EndedElsewhere : public Error {
 public:
  using Error::Error;
  explicit EndedElsewhere(const Error& error) : Error(error) {}
};

/// Throws what an event of failure says: EndedElsewhere for StepFailed, an Error for a worker of the pipeline
/// that is gone or cannot be reached. Returns for other events, and for workers that the pipeline does not
/// need.
void throw_failure(const LocalPipeline& local, std::uint64_t step, const StepEvent& event);

/// Throws when a worker of the pipeline has died or left before the step.
void check_presence(const LocalPipeline& local, std::uint64_t step);

}  // namespace torchspan::pipeline
