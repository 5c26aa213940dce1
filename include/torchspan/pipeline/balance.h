#pragma once
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/pipeline/layers.h>
#include <torchspan/pipeline/pipeline.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/schedule.h>

namespace torchspan::pipeline {

/// Splits items into consecutive, non-empty parts with the smallest maximum cost (exact, by dynamic
/// programming), then with parts as even as possible. Returns the number of items per part. Throws
/// Error{kInvalid} for negative costs or fewer items than parts.
std::vector<int> balance_costs(const std::vector<double>& costs, int parts);

/// Measured cost of a layer, over all its uses.
struct LayerCost {
  double forward_seconds = 0;
  double backward_seconds = 0;
  double parameter_bytes = 0;
  double activation_bytes = 0;  ///< of its outputs for the sample
  double kept_bytes = 0;        ///< of what it computes and a graph keeps until the backward
};

struct ProfileOptions {
  int repeats = 3;  ///< the fastest run counts
  /// For balance_by_time() and balance_by_size(): the workers that call it; empty: all.
  std::vector<std::string> workers = {};
};

/// Builds every layer locally, once, and runs `sample`, one micro-batch, forward and backward through every
/// use. Existing modules keep their parameters, gradients, buffers and modes, and LibTorch's generator its
/// state. Throws Error{kInvalid} that names the layer to which the sample does not fit, or while LibTorch's profiler runs
/// on this thread.
std::vector<LayerCost> profile(Executor& executor, const Layers& layers, const Batch& sample,
                               const ProfileOptions& options = {});

/// Returns a balance for PipelineOptions by measured forward and backward time. Collective over
/// ProfileOptions::workers: the first one measures with its `sample`; all get the same balance, or the same
/// Error{kInvalid} if a layer does not fit the sample. The others wait at most 5 minutes.
std::vector<int> balance_by_time(const Worker& worker, const Layers& layers, int stages, const Batch& sample,
                                 const ProfileOptions& options = {});
/// Returns a balance by memory: activations, and parameters times `parameter_scale` (to include gradients
/// and optimizer state). Collective like balance_by_time().
std::vector<int> balance_by_size(const Worker& worker, const Layers& layers, int stages, const Batch& sample,
                                 double parameter_scale = 2, const ProfileOptions& options = {});

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
