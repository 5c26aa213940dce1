#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// See Pipeline::clip_grad_norm(). `parameters` are those of this worker's layers.
double clip_gradients(const LocalPipeline& local, const std::vector<at::Tensor>& parameters, double max_norm,
                      double norm_type);

}  // namespace torchspan::pipeline
