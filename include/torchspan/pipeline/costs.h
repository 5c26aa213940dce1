#pragma once
#include <vector>

#include <torchspan/pipeline/layers.h>
#include <torchspan/pipeline/pipeline.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/schedule.h>

namespace torchspan::pipeline {

/// What measure_costs() runs.
struct CostSample {
  Batch input;  ///< one micro-batch
  Batch target;
  Loss loss;
  int repeats = 3;  ///< the fastest run counts; 1 or more
};

/// Measures what one micro-batch costs each layer range of the plan that `options` and the world of `worker` give: times,
/// and in bytes what it keeps until its input gradient, until its weight gradient, and while a forward is repeated.
/// Simulate tables of this plan with the result. Not collective: builds all layers here and needs their memory; existing
/// modules keep their parameters, gradients and buffers. ActivationCheckpoint::kExceptLast counts as kAlways. Throws
/// Error{kInvalid} if the sample does not fit, or while LibTorch's profiler runs on this thread.
std::vector<schedule::Costs> measure_costs(const Worker& worker, const Layers& layers,
                                           const PipelineOptions& options, const CostSample& sample);

}  // namespace torchspan::pipeline
