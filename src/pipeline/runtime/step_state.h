#pragma once
#include <memory>
#include <utility>

#include "pipeline/layers/micro_batches.h"
#include "pipeline/policies/policy.h"
#include "pipeline/runtime/cache_state.h"
#include "pipeline/runtime/step_exchange.h"
#include "pipeline/runtime/step_input.h"
#include "pipeline/runtime/step_loss.h"
#include "pipeline/runtime/step_output.h"
#include "pipeline/runtime/step_passes.h"
#include "pipeline/runtime/step_record.h"

namespace torchspan::pipeline {

/// What one worker needs to run a step.
struct StepWork {
  StepBegin begin;
  const schedule::Table* table = nullptr;  ///< the order of actions; null: order of arrival
  Batch input;                             ///< on the worker of the first layer range
  Batch target;                            ///< on the worker of the last layer range, if there is a loss
  const Loss* loss = nullptr;
  Future<void> before_first_backward = {};
  Cache::State* cache = nullptr;           ///< that the step continues; null: none
  device::Offloader* offloader = nullptr;  ///< of activations; null: they stay where they are
};

/// The data of one step on one worker.
struct StepState {
  StepState(const LocalPipeline& local, StepWork all)
      : work(std::move(all)),
        split(work.begin.rows),
        policy(make_policy(local, work.begin, work.table)),
        cache(work.cache != nullptr ? work.cache->tensors() : CacheTensors()),
        passes(local, work.begin, *policy, {work.cache != nullptr ? &cache : nullptr, work.offloader}),
        input(local, work.begin, std::move(work.input)),
        output(split.micro_batches()),
        record(local, work.begin),
        exchange(local, work.begin) {}
  StepState(const StepState&) = delete;
  StepState& operator=(const StepState&) = delete;

  StepWork work;
  const RowSplit split;
  const std::unique_ptr<Policy> policy;
  CacheTensors cache;
  StepPasses passes;
  StepInput input;
  StepOutput output;
  StepRecord record;
  StepExchange exchange;
  StepLoss own_loss;  ///< of this worker's part
  double loss = 0;    ///< of the whole step, after its end
};

}  // namespace torchspan::pipeline
