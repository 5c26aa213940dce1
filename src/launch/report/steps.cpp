#include "launch/report/steps.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string_view>

#include "launch/report/pipeline_steps.h"

namespace torchspan::launch {
namespace {

using StepMap = std::map<std::uint64_t, TrainingStep>;

void widen(StepMap& steps, std::size_t workers, std::size_t worker, std::uint64_t number, Interval part) {
  TrainingStep& step = steps[number];
  step.number = number;
  step.by_worker.resize(workers);
  Interval& own = step.by_worker[worker];
  own = own.length() == 0 ? part : Interval{std::min(own.begin, part.begin), std::max(own.end, part.end)};
}

TrainingSteps finish(StepMap steps, std::string source) {
  TrainingSteps result;
  for (auto& [number, step] : steps) {
    step.whole = {std::numeric_limits<std::int64_t>::max(), 0};
    for (const Interval& part : step.by_worker) {
      if (part.length() == 0) continue;
      step.whole.begin = std::min(step.whole.begin, part.begin);
      step.whole.end = std::max(step.whole.end, part.end);
    }
    if (step.whole.begin < step.whole.end) result.steps.push_back(std::move(step));
  }
  if (!result.steps.empty()) result.source = std::move(source);
  return result;
}

/// Steps from the program's spans of that name. Several spans of a worker with one number are one step.
StepMap named_steps(const TraceSet& set, std::string_view name) {
  StepMap steps;
  for (std::size_t w = 0; w < set.workers.size(); ++w) {
    std::uint64_t count = 0;
    for (const StoredSpan& span : set.workers[w].contents.spans) {
      if (span.kind != SpanKind::kUser || set.workers[w].name_of(span) != name) continue;
      const std::uint64_t number = span.link.id != 0 ? span.link.id : count;
      ++count;
      widen(steps, set.workers.size(), w, number, {span.begin, span.end});
    }
  }
  return steps;
}

/// A step ends when its reduction does, and begins when the previous one ends.
StepMap reduction_steps(const TraceSet& set) {
  StepMap steps;
  for (std::size_t w = 0; w < set.workers.size(); ++w) {
    const WorkerTrace& worker = set.workers[w];
    std::map<std::uint64_t, Interval> rounds;
    for (const StoredSpan& span : worker.contents.spans) {
      if (span.kind != SpanKind::kBucket || span.link.part >= 0) continue;
      const std::string& name = worker.name_of(span);
      if (name != "reduction" && name != "forward" && name != "backward") continue;
      Interval& round = rounds.try_emplace(span.link.id, Interval{span.begin, 0}).first->second;
      round.begin = std::min(round.begin, span.begin);
      if (name == "reduction") round.end = span.end;
    }
    std::int64_t previous = 0;
    for (const auto& [number, round] : rounds) {
      if (round.end == 0) continue;
      const std::int64_t begin = previous == 0 ? round.begin : previous;
      if (begin < round.end) widen(steps, set.workers.size(), w, number, {begin, round.end});
      previous = round.end;
    }
  }
  return steps;
}

StepMap pipeline_steps(const TraceSet& set) {
  StepMap steps;
  const std::set<std::uint64_t> measured = measured_pipeline_steps(set);
  for (std::size_t w = 0; w < set.workers.size(); ++w) {
    for (const StoredSpan& span : set.workers[w].contents.spans) {
      if (span.kind != SpanKind::kPipeline || !measured.contains(span.link.id)) continue;
      if (!parse_action(set.workers[w].name_of(span))) continue;
      widen(steps, set.workers.size(), w, span.link.id, {span.begin, span.end});
    }
  }
  return steps;
}

}  // namespace

TrainingSteps find_steps(const TraceSet& set) {
  TrainingSteps steps = finish(named_steps(set, "step"), "spans named step");
  if (steps.steps.empty()) steps = finish(reduction_steps(set), "reductions");
  if (steps.steps.empty()) steps = finish(pipeline_steps(set), "pipeline steps");
  if (steps.steps.empty()) steps = finish(named_steps(set, "progress"), "reports of progress");
  return steps;
}

std::int64_t union_length(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::int64_t total = 0, end = std::numeric_limits<std::int64_t>::min();
  for (const Interval& interval : intervals) {
    total += std::max<std::int64_t>(0, interval.end - std::max(interval.begin, end));
    end = std::max(end, interval.end);
  }
  return total;
}

}  // namespace torchspan::launch
