#pragma once
#include <cstdint>

#include "launch/trace/json_events.h"
#include "launch/trace/profiler_file.h"

namespace torchspan::launch {

/// Where the events of a profile are written.
struct ProfilePlace {
  int rank = 0;
  int first_thread = 0;       ///< number of the profile's first row
  std::int64_t shortest = 0;  ///< leaves out shorter events
};

/// Writes a profile as rows of a rank's process. Returns the number of events written.
std::uint64_t write_profile(const ProfilerTrace& profile, const ProfilePlace& place, JsonEvents& out);

}  // namespace torchspan::launch
