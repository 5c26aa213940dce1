#pragma once
#include <torchspan/pipeline.h>
#include <torchspan/pipeline/layers.h>
#include <torchspan/rpc/worker.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Makes the plan, compares it with the other workers, and builds the layers of this worker. Throws
/// Error{kInvalid} on all workers if their pipelines differ.
LocalPipeline make_local(const Worker& worker, const Layers& layers, PipelineOptions options);

/// The plan and options of replica 0, without layers, and without asking the other workers.
LocalPipeline make_unconnected(const Worker& worker, const Layers& layers, PipelineOptions options);

}  // namespace torchspan::pipeline
