#pragma once
#include <torchspan/pipeline/layers.h>
#include <torchspan/pipeline/options.h>
#include <torchspan/rpc/worker.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Plans, agrees with the other workers and builds the layers of this one. Throws Error{kInvalid} on all of
/// them when they want different pipelines.
LocalPipeline make_local(const Worker& worker, const Layers& layers, PipelineOptions options);

}  // namespace torchspan::pipeline
