#pragma once
// Pipelines over workers: layers, plans, schedules. DeferredBatchNorm, which needs torch/nn.h, is in
// pipeline/deferred_batch_norm.h.
#include <torchspan/pipeline/balance.h>
#include <torchspan/pipeline/pipeline.h>
