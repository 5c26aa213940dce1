#pragma once
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "pipeline/runtime/local_pipeline.h"
#include "state/api/place.h"

namespace torchspan::pipeline {

/// Gives the parameters of this worker's layers places among the workers of the pipeline, while it lives. Copies of a tied
/// parameter on other workers than the first one are repeated.
class PipelinePlaces {
 public:
  PipelinePlaces(const LocalPipeline& local, const std::vector<at::Tensor>& parameters);
  ~PipelinePlaces();
  PipelinePlaces(const PipelinePlaces&) = delete;
  PipelinePlaces& operator=(const PipelinePlaces&) = delete;

 private:
  std::vector<std::pair<at::Tensor, state::PlacePtr>> before_;
};

/// See Pipeline::clip_grad_norm(). `parameters` are those of this worker's layers.
double clip_gradients(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type);

}  // namespace torchspan::pipeline
