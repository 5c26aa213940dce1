#pragma once
#include <string>
#include <vector>

#include "launch/trace/profiler_file.h"
#include "launch/trace/trace_set.h"

namespace torchspan::launch {

/// A file of LibTorch's profiler.
struct NamedProfile {
  std::string file;
  ProfilerTrace trace;
};

/// The files of LibTorch's profiler in a folder.
struct ProfileFiles {
  std::vector<NamedProfile> profiles;
  std::vector<std::string> notes;  ///< about files that cannot be used
};

/// Reads all *.json files of `folder` that are profiles.
ProfileFiles read_profiles(const std::string& folder);

/// Gives each profile to the worker that wrote it, on the time scale of `set`; adds the notes. Profile and worker have the
/// same process id; of several such workers, on several hosts, the one with the profile's rank: the file states it, or is
/// called NAME.RANK.json. Profiles of other processes, and of another time than the run, are left out, with a note.
void attach_profiles(ProfileFiles files, TraceSet& set);

}  // namespace torchspan::launch
