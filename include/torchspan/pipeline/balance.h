#pragma once
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/pipeline/layers.h>
#include <torchspan/rpc/worker.h>

namespace torchspan::pipeline {

/// How many consecutive items each of `parts` gets so that the most expensive part is as cheap as it can be
/// (exact, by dynamic programming); among those, parts as even as they can be. No part is empty. Throws
/// Error{kInvalid} for negative costs, or fewer items than parts.
std::vector<int> balance_costs(const std::vector<double>& costs, int parts);

/// What a layer costs, all its uses together.
struct LayerCost {
  double forward_seconds = 0;
  double backward_seconds = 0;
  double parameter_bytes = 0;
  double activation_bytes = 0;  ///< its outputs for the sample
};

struct ProfileOptions {
  int repeats = 3;  ///< the fastest counts
  /// Of balance_by_time() and balance_by_size(): the workers that call it; empty: all workers.
  std::vector<std::string> workers = {};
};

/// Builds every layer here, once, and drives `sample`, one micro-batch, through all of them forwards and
/// backwards, use by use. Modules that are there already keep their parameters, gradients, buffers and modes,
/// LibTorch's generator its state. Throws Error{kInvalid} that names the layer which the sample does not fit.
std::vector<LayerCost> profile(Executor& executor, const Layers& layers, const Batch& sample,
                               const ProfileOptions& options = {});

/// Balance for PipelineOptions by measured forward and backward time. Collective over
/// ProfileOptions::workers: the first one measures, with its `sample`, and all of them get the same balance,
/// or the same Error{kInvalid} when a layer does not fit the sample. The others wait for at most 5 minutes.
std::vector<int> balance_by_time(const Worker& worker, const Layers& layers, int stages, const Batch& sample,
                                 const ProfileOptions& options = {});
/// The same by memory: parameters times `parameter_scale` (themselves, gradients, optimizer's state) and
/// activations.
std::vector<int> balance_by_size(const Worker& worker, const Layers& layers, int stages, const Batch& sample,
                                 double parameter_scale = 2, const ProfileOptions& options = {});

}  // namespace torchspan::pipeline
