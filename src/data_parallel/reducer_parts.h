#pragma once
#include <torchspan/collective/group.h>
#include <torchspan/data_parallel/options.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/core/runtime.h>

#include "data_parallel/buckets/bucket_plan.h"
#include "data_parallel/buckets/bucket_reducer.h"
#include "data_parallel/passes/forward_log.h"
#include "data_parallel/passes/hold_count.h"
#include "data_parallel/passes/parameter_slots.h"
#include "data_parallel/passes/slot_hooks.h"
#include "data_parallel/passes/undefined_gradients.h"
#include "data_parallel/reducer_meter.h"
#include "data_parallel/rounds/status_exchange.h"
#include "data_parallel/streams/reduction_stream.h"

namespace torchspan::data_parallel {

/// The parts of one reducer that its forwards and its rounds share. Constructing them is collective.
struct ReducerParts {
  ReducerParts(const Reducer::Replicas& replicas, const collective::Group& parent,
               DataParallelOptions options)
      : options(std::move(options)),
        group(parent.split(0, parent.rank())),
        runtime(group.backend()->runtime()),
        slots(replicas),
        hooks(slots),
        undefined(slots),
        holds(runtime.executor),
        meter(runtime),
        status(group, this->options.find_unused_parameters || this->options.static_graph ? slots.count() : 0),
        plan(runtime.log, slots, this->options, group),
        reducer(slots, group),
        stream(slots.tensor(0).device()) {
    meter.set_buckets(*plan.buckets(), slots);
  }
  ReducerParts(const ReducerParts&) = delete;
  ReducerParts& operator=(const ReducerParts&) = delete;

  const DataParallelOptions options;
  const collective::Group group;
  Runtime& runtime;
  const ParameterSlots slots;
  SlotHooks hooks;
  UndefinedGradients undefined;
  HoldCount holds;
  ForwardLog forwards;
  ReducerMeter meter;
  StatusExchange status;
  BucketPlan plan;
  BucketReducer reducer;
  const ReductionStream stream;
};

}  // namespace torchspan::data_parallel
