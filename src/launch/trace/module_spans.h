#pragma once
#include "core/api/trace_format.h"

namespace torchspan::launch {

/// Replaces the operators that used parameters of modules (kModuleSpan) by spans of the modules' calls, "forward encoder"
/// and "backward encoder", which have the number of the call as id. A module encloses those inside it: its forward lasts
/// from its first operator with a parameter to its last, its backward from its first autograd node to its last. A module
/// that uses its first parameter again, or after a backward on its thread, begins a new call.
void make_module_spans(TraceContents& trace);

}  // namespace torchspan::launch
