#include "launch/trace/profile_json.h"

#include <fmt/format.h>
#include <set>
#include <utility>

#include "launch/trace/profiler_rows.h"

namespace torchspan::launch {
namespace {

/// After the rows of threads and steps, before those of calls.
constexpr int kProfilerOrder = -400;

class ProfileJson {
 public:
  ProfileJson(const ProfilerTrace& profile, const ProfilePlace& place, JsonEvents& out)
      : profile_(profile), place_(place), out_(out) {}

  std::uint64_t write() {
    const std::vector<ProfilerRow> rows = make_profiler_rows(profile_);
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (!rows[row].nested.empty()) write_row(row, rows[row]);
      for (const std::size_t i : rows[row].overlapping) write_overlapping(profile_.events[i]);
    }
    for (const ProfilerArrow& arrow : profile_.arrows) {
      if (!begins_.contains(key_of(arrow.from)) || !begins_.contains(key_of(arrow.to))) continue;
      out_.begin_arrow(place_.rank, thread_of(arrow.from.row), arrow.from.at);
      out_.end_arrow(place_.rank, thread_of(arrow.to.row), arrow.to.at);
    }
    return written_;
  }

 private:
  using Key = std::pair<std::uint32_t, std::int64_t>;  ///< row, time
  static Key key_of(const ProfilerArrow::End& end) { return {end.row, end.at}; }
  int thread_of(std::size_t row) const { return place_.first_thread + static_cast<int>(row); }
  bool chosen(const ProfilerEvent& event) const { return event.end - event.begin >= place_.shortest; }

  void write_row(std::size_t row, const ProfilerRow& events) {
    const int thread = thread_of(row);
    out_.add_metadata(place_.rank, thread, "thread_name",
                      fmt::format(R"("name":{})", json_string(profile_.rows[row])));
    out_.add_metadata(place_.rank, thread, "thread_sort_index",
                      fmt::format(R"("sort_index":{})", kProfilerOrder + static_cast<int>(row % 400)));
    for (const std::size_t i : events.nested) {
      const ProfilerEvent& event = profile_.events[i];
      if (!chosen(event)) continue;
      out_.add_slice(place_.rank, thread, event.begin, event.end, profile_.categories[event.category],
                     profile_.names[event.name], event.arguments);
      if (event.end > event.begin) begins_.insert({event.row, event.begin});
      ++written_;
    }
  }

  void write_overlapping(const ProfilerEvent& event) {
    if (!chosen(event)) return;
    out_.add_overlapping(place_.rank, event.begin, event.end, profile_.categories[event.category],
                         profile_.names[event.name], event.arguments);
    ++written_;
  }

  const ProfilerTrace& profile_;
  const ProfilePlace place_;
  JsonEvents& out_;
  std::set<Key> begins_;  ///< of the slices that were written: arrows end there
  std::uint64_t written_ = 0;
};

}  // namespace

std::uint64_t write_profile(const ProfilerTrace& profile, const ProfilePlace& place, JsonEvents& out) {
  return ProfileJson(profile, place, out).write();
}

}  // namespace torchspan::launch
