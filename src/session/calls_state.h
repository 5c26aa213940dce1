#pragma once
#include <string>
#include <vector>

#include <torchspan/rpc/debug.h>

#include "autograd/api/running_passes.h"

namespace torchspan {

/// Encodes a worker's calls as JSON: those that wait for a reply, those that it serves, its threads, and the backward
/// passes in which it takes part.
std::string encode_calls(const DebugInfo& info, const std::vector<autograd::RunningPass>& passes);

}  // namespace torchspan
