#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "launch/trace/profiler_file.h"

namespace torchspan::launch {

/// The events of one row of a profile.
struct ProfilerRow {
  std::vector<std::size_t>
      nested;  ///< indices, by beginning, longer ones first; each is inside, or apart from, others
  std::vector<std::size_t> overlapping;  ///< those that overlap a nested one in part
};

/// Distributes the events of a profile to its rows.
std::vector<ProfilerRow> make_profiler_rows(const ProfilerTrace& profile);

}  // namespace torchspan::launch
