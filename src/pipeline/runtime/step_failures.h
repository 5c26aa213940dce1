#pragma once
#include <string>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Another worker ended the step and reported the error to all.
class EndedElsewhere : public Error {
 public:
  using Error::Error;
  explicit EndedElsewhere(const Error& error) : Error(error) {}
};

/// The error that ends the step because a worker of the pipeline died, left or cannot be reached.
Error gone(const LocalPipeline& local, std::uint64_t step, std::uint32_t rank, const Error& reason);

/// Throws if the event ends the step: EndedElsewhere for StepFailed, an Error for a worker of the pipeline
/// that died, left or cannot be reached. Returns for other events and for workers of other pipelines.
void throw_failure(const LocalPipeline& local, std::uint64_t step, const StepEvent& event);

/// Reports this worker's failure in a step to the other workers of the pipeline, and waits for a second at most
/// until they have the report: if this worker leaves because of the error, its departure must not overtake it.
void report_failure(const LocalPipeline& local, std::uint64_t step, const Error& error);

/// Throws if a worker of the pipeline died or left before the step.
void check_presence(const LocalPipeline& local, std::uint64_t step);

}  // namespace torchspan::pipeline
