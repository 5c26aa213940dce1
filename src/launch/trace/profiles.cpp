#include "launch/trace/profiles.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <limits>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/parse_number.h"

namespace torchspan::launch {
namespace {

/// The number before ".json"; nullopt if there is none.
std::optional<std::int64_t> rank_in_name(const std::string& file) {
  const std::string stem = std::filesystem::path(file).stem().string();
  return parse_number<std::int64_t>(stem.substr(stem.rfind('.') + 1));
}

/// Returns the worker that wrote a profile; null, with a note, if none or more than one could have.
WorkerTrace* writer_of(const NamedProfile& profile, TraceSet& set) {
  std::vector<WorkerTrace*> writers;
  for (WorkerTrace& worker : set.workers) {
    if (profile.trace.processes.contains(worker.contents.identity.process)) writers.push_back(&worker);
  }
  if (writers.empty()) {
    set.notes.push_back(fmt::format(
        "the profile '{}' is left out: none of its processes is a worker of this run", profile.file));
    return nullptr;
  }
  if (writers.size() == 1) return writers.front();
  const auto rank = profile.trace.rank ? profile.trace.rank : rank_in_name(profile.file);
  const auto writer = std::ranges::find_if(writers, [&](auto* worker) { return rank == worker->rank(); });
  if (writer != writers.end()) return *writer;
  set.notes.push_back(
      fmt::format("the profile '{}' is left out: workers of several hosts have its process id; name it "
                  "NAME.RANK.json",
                  profile.file));
  return nullptr;
}

/// Converts times since 1970, by the calendar of a worker's host, to the scale of the set.
class CalendarTimes {
 public:
  CalendarTimes(const WorkerTrace& worker, const TraceSet& set) : worker_(worker), base_(set.base) {}
  std::int64_t operator()(std::int64_t time) const {
    const TraceIdentity& identity = worker_.contents.identity;
    const std::int64_t here = identity.began + (time - identity.unix_began);
    return (worker_.other_host ? worker_.clock.to_reference(here) : here) - base_;
  }

 private:
  const WorkerTrace& worker_;
  const std::int64_t base_;
};

/// Whether the profile was recorded during the run, or up to a minute before or after it. Times that are not those of a
/// calendar are far away.
bool is_of_run(const ProfilerTrace& profile, const WorkerTrace& worker, const TraceSet& set) {
  constexpr std::int64_t kMinute = 60'000'000'000, kFar = std::int64_t{1} << 60;
  const std::int64_t began = worker.contents.identity.unix_began;
  std::int64_t first = std::numeric_limits<std::int64_t>::max(),
               last = std::numeric_limits<std::int64_t>::min();
  for (const ProfilerEvent& event : profile.events) {
    first = std::min(first, event.begin);
    last = std::max(last, event.end);
  }
  if (first > last || began <= 0 || began > 4 * kFar || first < 0) return false;
  if (first > began + kFar || last < began - kFar || last > began + kFar) return false;
  const CalendarTimes convert(worker, set);
  return convert(last) >= -kMinute && convert(first) <= set.length + kMinute;
}

void convert_profile(ProfilerTrace& profile, const CalendarTimes& convert) {
  for (ProfilerEvent& event : profile.events) {
    event.begin = convert(event.begin);
    event.end = std::max(event.begin, convert(event.end));
  }
  for (ProfilerArrow& arrow : profile.arrows) {
    arrow.from.at = convert(arrow.from.at);
    arrow.to.at = convert(arrow.to.at);
  }
}

void read_profile(const std::filesystem::path& path, ProfileFiles& files) {
  try {
    std::ifstream file(path, std::ios::binary);
    if (auto profile = decode_profile(file)) {
      files.profiles.push_back({path.filename().string(), std::move(*profile)});
    }
  } catch (const Error& error) {
    files.notes.push_back(fmt::format("'{}' is left out: {}", path.filename().string(), error.message()));
  }
}

}  // namespace

ProfileFiles read_profiles(const std::string& folder) {
  ProfileFiles files;
  std::vector<std::filesystem::path> paths;
  std::error_code failure;
  for (const auto& entry : std::filesystem::directory_iterator(folder, failure)) {
    if (entry.path().extension() == ".json") paths.push_back(entry.path());
    if (entry.path().filename().string().ends_with(".json.gz")) {
      files.notes.push_back(fmt::format("'{}' is not read: unpack it with gunzip if it is a profile",
                                        entry.path().filename().string()));
    }
  }
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) read_profile(path, files);
  return files;
}

void attach_profiles(ProfileFiles files, TraceSet& set) {
  set.notes.insert(set.notes.end(), files.notes.begin(), files.notes.end());
  std::int64_t first = 0;
  for (NamedProfile& profile : files.profiles) {
    if (profile.trace.events.empty()) continue;
    WorkerTrace* worker = writer_of(profile, set);
    if (worker == nullptr) continue;
    if (!is_of_run(profile.trace, *worker, set)) {
      set.notes.push_back(
          fmt::format("the profile '{}' is left out: it was not recorded during this run", profile.file));
      continue;
    }
    convert_profile(profile.trace, CalendarTimes(*worker, set));
    if (profile.trace.unusable > 0) {
      set.notes.push_back(
          fmt::format("{} events of the profile '{}' are left out: they have no name, time or "
                      "thread",
                      profile.trace.unusable, profile.file));
    }
    for (const ProfilerEvent& event : profile.trace.events) first = std::min(first, event.begin);
    worker->profiles.push_back(std::move(profile.trace));
  }
  if (first < 0) move_base(set, first);
}

}  // namespace torchspan::launch
