#pragma once
#include <string>

#include <torchspan/rpc/debug.h>

namespace torchspan {

/// Encodes a worker's calls as JSON: those that wait for a reply, those that it serves, and its threads.
std::string encode_calls(const DebugInfo& info);

}  // namespace torchspan
