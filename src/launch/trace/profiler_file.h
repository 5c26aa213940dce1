#pragma once
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace torchspan::launch {

/// One event that LibTorch's profiler recorded.
struct ProfilerEvent {
  std::int64_t begin = 0, end = 0;  ///< nanoseconds
  std::uint32_t name = 0, category = 0;
  std::uint32_t row = 0;  ///< thread, or stream of a device
  std::string arguments;  ///< the members of a JSON object, without its braces
};

/// An arrow between two moments of rows, from a forward to its backward or from a launch to its kernel.
struct ProfilerArrow {
  struct End {
    std::uint32_t row = 0;
    std::int64_t at = 0;
  };
  End from, to;
};

/// The contents of one file of LibTorch's profiler.
struct ProfilerTrace {
  std::vector<std::string> names, categories, rows;
  std::vector<ProfilerEvent> events;
  std::vector<ProfilerArrow> arrows;
  std::set<std::int64_t> processes;  ///< ids of processes of the host
  std::optional<std::int64_t> rank;  ///< if the program used c10d
  std::uint64_t unusable = 0;        ///< events without a time, name or thread
};

/// Reads a file that LibTorch's profiler saved (Chrome's JSON format): events with a duration and arrows. Times become
/// nanoseconds since 1970. Returns nullopt for other JSON and for what `torchspan trace` wrote; throws Error{kInvalid} for text that is not JSON.
std::optional<ProfilerTrace> decode_profile(std::istream& file);

}  // namespace torchspan::launch
