#pragma once

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// Gives this worker's parameters and buffers the values that they have in replica 0. Collective over the workers of all
/// replicas that own the same stages. Throws Error{kInvalid} if shapes or dtypes differ.
void copy_from_first_replica(const LocalPipeline& local);

}  // namespace torchspan::pipeline
