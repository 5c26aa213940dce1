#pragma once
#include <string>

#include <torchspan/detail/core/runtime.h>

#include "core/api/observation.h"
#include "core/api/trace_format.h"

namespace torchspan {

/// Describes what a worker does now as a JSON object. `calls` is a JSON value from the rooms above. Ages are seconds.
std::string describe_worker(Runtime& runtime, const TraceIdentity& identity, const std::string& calls,
                            StateDetail detail);

}  // namespace torchspan
