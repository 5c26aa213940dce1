#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "launch/trace/trace_set.h"

namespace torchspan::launch {

/// Durations of the forwards or the backwards of one module on all ranks, in nanoseconds.
struct ModuleTimes {
  std::uint64_t count = 0;
  std::int64_t p50 = 0;
  std::int64_t total = 0;
};

/// A module that the program named (engine/operator_trace.h). The times of a module contain those of the modules inside it.
struct ModuleFigures {
  std::string name;
  ModuleTimes forward, backward;
};

/// The modules of a run, the largest sum of forwards and backwards first.
std::vector<ModuleFigures> examine_modules(const TraceSet& set);

}  // namespace torchspan::launch
