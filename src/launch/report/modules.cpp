#include "launch/report/modules.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

#include "core/api/operator_spans.h"
#include "launch/report/calls.h"

namespace torchspan::launch {
namespace {

struct ModuleDurations {
  std::vector<std::int64_t> forward, backward;
};

ModuleTimes times_of(std::vector<std::int64_t>& durations) {
  return {durations.size(), percentile(durations, 0.5),
          std::accumulate(durations.begin(), durations.end(), std::int64_t{0})};
}

}  // namespace

std::vector<ModuleFigures> examine_modules(const TraceSet& set) {
  constexpr std::string_view kForward = "forward ", kBackward = "backward ";
  std::map<std::string, ModuleDurations> modules;
  for (const WorkerTrace& worker : set.workers) {
    for (const StoredSpan& span : worker.contents.spans) {
      if (span.kind != kModuleSpan) continue;
      const std::string& name = worker.name_of(span);
      const std::int64_t duration = span.end - span.begin;
      if (name.starts_with(kForward)) modules[name.substr(kForward.size())].forward.push_back(duration);
      if (name.starts_with(kBackward)) modules[name.substr(kBackward.size())].backward.push_back(duration);
    }
  }
  std::vector<ModuleFigures> figures;
  for (auto& [name, durations] : modules) {
    figures.push_back({name, times_of(durations.forward), times_of(durations.backward)});
  }
  std::ranges::stable_sort(figures, std::greater<>(), [](const ModuleFigures& module) {
    return module.forward.total + module.backward.total;
  });
  return figures;
}

}  // namespace torchspan::launch
