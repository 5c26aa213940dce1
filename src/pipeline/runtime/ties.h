#pragma once
#include <string>
#include <vector>

#include <torchspan/pipeline/layers.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Text of the ties of a model, which must be the same on all workers.
std::string to_text(const std::vector<std::vector<TiedParameter>>& ties);

/// Finds the tied parameters of this worker's layers, and gives all copies the values of the first. Collective, after
/// the layers were built. Throws Error{kInvalid} on all workers for parameters that do not exist or do not match.
std::vector<Tie> make_ties(const LocalPipeline& local, const Layers& layers);

}  // namespace torchspan::pipeline
