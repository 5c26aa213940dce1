#pragma once
#include <string>
#include <vector>

#include <torchspan/pipeline/layers.h>

#include "pipeline/runtime/local_pipeline.h"

/// Tensors of which several workers of a pipeline have copies: tensors that layers share, tied parameters, and the
/// parameters and buffers of replicas.
namespace torchspan::pipeline {

/// Text of the ties of a model, which must be the same on all workers.
std::string to_text(const std::vector<std::vector<TiedParameter>>& ties);

/// One line for each tensor of this worker's layers that a layer of another worker may refer to as well: each owner's
/// process has its own copy, so a change on one worker does not reach the others. Considers the parameters and buffers that
/// exist before their layers are built: those of modules passed to Layers::add_existing, and tensors and modules among the
/// arguments of Layers::add.
std::string report_shared_tensors(const LocalPipeline& local, const Layers& layers);

/// Throws Error{kInvalid} if two workers report the same parameter and it requires gradients. Returns the
/// tensors of this worker that other workers have copies of; they must not change in a step.
std::vector<SharedConstant> check_shared_tensors(const LocalPipeline& local,
                                                 const std::vector<std::string>& reports);

/// Finds the tied parameters of this worker's layers. Then gives all copies of a parameter or buffer the values of the
/// first: those of ties, and those of replicas. Collective over all workers, after their layers were built. Throws
/// Error{kInvalid} on all workers for tied parameters that do not exist or do not match, and for replicas with other layers.
void share_initial_values(LocalPipeline& local, const Layers& layers);

}  // namespace torchspan::pipeline
