#include "launch/trace/profiler_rows.h"

#include <algorithm>
#include <cstdint>

namespace torchspan::launch {

std::vector<ProfilerRow> make_profiler_rows(const ProfilerTrace& profile) {
  const std::vector<ProfilerEvent>& events = profile.events;
  std::vector<std::size_t> order(events.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return events[a].begin != events[b].begin ? events[a].begin < events[b].begin
                                              : events[a].end > events[b].end;
  });
  std::vector<ProfilerRow> rows(profile.rows.size());
  std::vector<std::vector<std::int64_t>> open(profile.rows.size());  // ends of the enclosing events
  for (const std::size_t i : order) {
    const ProfilerEvent& event = events[i];
    std::vector<std::int64_t>& enclosing = open[event.row];
    while (!enclosing.empty() && enclosing.back() <= event.begin) enclosing.pop_back();
    if (!enclosing.empty() && event.end > enclosing.back()) {
      rows[event.row].overlapping.push_back(i);
      continue;
    }
    enclosing.push_back(event.end);
    rows[event.row].nested.push_back(i);
  }
  return rows;
}

}  // namespace torchspan::launch
