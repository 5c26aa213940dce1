#include "schedule/drawing/drawing.h"

#include <algorithm>
#include <fmt/format.h>

#include <torchspan/core/error.h>

namespace torchspan::schedule {
namespace {

void check_length(const Timeline& timeline, std::string_view function, std::string_view field,
                  std::size_t length, std::size_t expected) {
  if (length == expected) return;
  throw Error(ErrorKind::kInvalid, fmt::format("{}: in timeline '{}' {} has {} entries and spans {}",
                                               function, timeline.name, field, length, expected));
}

}  // namespace

void check(const Timeline& timeline, std::string_view function) {
  const std::size_t ranks = timeline.spans.size();
  check_length(timeline, function, "idle", timeline.idle.size(), ranks);
  check_length(timeline, function, "peak_live", timeline.peak_live.size(), ranks);
  check_length(timeline, function, "live", timeline.live.size(), ranks);
  const bool has_weight_inputs = !timeline.weight_inputs.empty();
  if (has_weight_inputs) {
    check_length(timeline, function, "weight_inputs", timeline.weight_inputs.size(), ranks);
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    check_length(timeline, function, fmt::format("live[{}]", rank), timeline.live[rank].size(),
                 timeline.spans[rank].size());
    if (has_weight_inputs) {
      check_length(timeline, function, fmt::format("weight_inputs[{}]", rank),
                   timeline.weight_inputs[rank].size(), timeline.spans[rank].size());
    }
    Duration now{0};
    for (const ActionSpan& span : timeline.spans[rank]) {
      if (span.start < now || span.end < span.start || span.end > timeline.makespan) {
        throw Error(
            ErrorKind::kInvalid,
            fmt::format("{}: in timeline '{}' rank {} runs {} from {} to {} ns, before {} ns or after the "
                        "makespan",
                        function, timeline.name, rank, to_string(span.action), span.start.count(),
                        span.end.count(), now.count()));
      }
      now = span.end;
    }
  }
}

Duration shortest_span(const Timeline& timeline) {
  Duration shortest = Duration::max();
  for (const auto& spans : timeline.spans) {
    for (const ActionSpan& span : spans) {
      if (span.end > span.start) shortest = std::min(shortest, span.end - span.start);
    }
  }
  return shortest == Duration::max() ? Duration::zero() : shortest;
}

std::vector<int> stages_of(const std::vector<ActionSpan>& spans) {
  std::vector<int> stages;
  for (const ActionSpan& span : spans) stages.push_back(span.action.stage);
  std::sort(stages.begin(), stages.end());
  stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
  return stages;
}

char letter(ActionKind kind) {
  const auto number = static_cast<std::size_t>(kind);
  return number < 4 ? "FBIW"[number] : '?';
}

}  // namespace torchspan::schedule
