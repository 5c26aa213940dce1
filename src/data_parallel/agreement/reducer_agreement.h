#pragma once
#include <torchspan/collective/group.h>
#include <torchspan/data_parallel/options.h>
#include <torchspan/data_parallel/reducer.h>

#include "data_parallel/api/agreement.h"

namespace torchspan::data_parallel {

/// What a reducer's ranks must have in common: options and parameters, or why this rank's are wrong.
Agreement reducer_agreement(const Reducer::Replicas& replicas, const DataParallelOptions& options,
                            const collective::Group& group);

}  // namespace torchspan::data_parallel
