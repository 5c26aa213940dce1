#include "launch/report/figures.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/span_kinds.h"

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

namespace {

struct MeasuredStep {
  std::int64_t begin = std::numeric_limits<std::int64_t>::max();
  std::int64_t end = 0;
  std::int64_t busy = 0;
  std::map<int, std::vector<schedule::ActionSpan>> by_rank;  ///< times since the trace began
  std::int64_t length() const { return end - begin; }
};

std::map<std::uint64_t, MeasuredStep> collect_steps(const TraceSet& set) {
  std::map<std::uint64_t, MeasuredStep> steps;
  for (const WorkerTrace& worker : set.workers) {
    for (const StoredSpan& span : worker.contents.spans) {
      if (span.kind != SpanKind::kPipeline) continue;
      const auto action = parse_action(worker.name_of(span));
      if (!action) continue;
      MeasuredStep& step = steps[span.link.id];
      step.begin = std::min(step.begin, span.begin);
      step.end = std::max(step.end, span.end);
      step.busy += span.end - span.begin;
      step.by_rank[worker.rank()].push_back({*action, Duration(span.begin), Duration(span.end)});
    }
  }
  return steps;
}

schedule::Timeline timeline_of(MeasuredStep step) {
  schedule::Timeline timeline;
  timeline.name = "measured";
  timeline.makespan = Duration(step.length());
  for (auto& [rank, spans] : step.by_rank) {
    std::sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) { return a.start < b.start; });
    Duration busy{0};
    for (schedule::ActionSpan& span : spans) {
      span.start -= Duration(step.begin);
      span.end -= Duration(step.begin);
      busy += span.end - span.start;
    }
    timeline.idle.push_back(timeline.makespan - busy);
    timeline.spans.push_back(std::move(spans));
  }
  return timeline;
}

/// Runs the step's actions in their order at their mean costs.
std::optional<schedule::Timeline> simulate_step(const schedule::Timeline& measured) {
  schedule::Table table;
  int stages = 0;
  table.name = "simulated";
  for (const auto& spans : measured.spans) {
    table.actions.emplace_back();
    for (const schedule::ActionSpan& span : spans) {
      table.actions.back().push_back(span.action);
      stages = std::max(stages, span.action.stage + 1);
      table.micro_batches = std::max(table.micro_batches, span.action.micro_batch + 1);
    }
  }
  table.rank_of_stage.assign(static_cast<std::size_t>(stages), 0);
  for (std::size_t row = 0; row < measured.spans.size(); ++row) {
    for (const schedule::ActionSpan& span : measured.spans[row]) {
      table.rank_of_stage[static_cast<std::size_t>(span.action.stage)] = static_cast<int>(row);
    }
  }
  try {
    return schedule::simulate(table, schedule::mean_costs(measured, stages));
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

std::optional<schedule::Action> parse_action(const std::string& text) {
  constexpr std::string_view kLetters = "FBIW";
  schedule::Action action;
  const char* end = text.data() + text.size();
  const auto stage = std::from_chars(text.data(), end, action.stage);
  if (stage.ec != std::errc() || stage.ptr == end || action.stage < 0 || action.stage > 4095)
    return std::nullopt;
  const auto letter = kLetters.find(*stage.ptr);
  if (letter == std::string_view::npos) return std::nullopt;
  constexpr std::array kKinds = {schedule::ActionKind::kForward, schedule::ActionKind::kBackward,
                                 schedule::ActionKind::kInputGradient, schedule::ActionKind::kWeightGradient};
  action.kind = kKinds[letter];
  const auto batch = std::from_chars(stage.ptr + 1, end, action.micro_batch);
  if (batch.ec != std::errc() || batch.ptr != end || action.micro_batch < 0 || action.micro_batch > 65535) {
    return std::nullopt;
  }
  return action;
}

std::set<std::uint64_t> measured_pipeline_steps(const TraceSet& set) {
  std::set<std::uint64_t> all, with_backward;
  for (const WorkerTrace& worker : set.workers) {
    for (const StoredSpan& span : worker.contents.spans) {
      if (span.kind != SpanKind::kPipeline) continue;
      const auto action = parse_action(worker.name_of(span));
      if (!action) continue;
      all.insert(span.link.id);
      if (action->kind != schedule::ActionKind::kForward) with_backward.insert(span.link.id);
    }
  }
  return with_backward.empty() ? all : with_backward;
}

std::optional<PipelineFigures> examine_pipeline(const TraceSet& set) {
  std::map<std::uint64_t, MeasuredStep> steps = collect_steps(set);
  if (steps.empty()) return std::nullopt;
  PipelineFigures figures;
  const std::set<std::uint64_t> measured = measured_pipeline_steps(set);
  figures.left_out = std::erase_if(steps, [&](const auto& step) { return !measured.contains(step.first); });
  std::vector<std::pair<std::int64_t, std::uint64_t>> lengths;
  std::int64_t busy = 0, all = 0;
  for (const auto& [id, step] : steps) {
    lengths.emplace_back(step.length(), id);
    busy += step.busy;
    all += step.length() * std::ssize(step.by_rank);
  }
  std::nth_element(lengths.begin(), lengths.begin() + std::ssize(lengths) / 2, lengths.end());
  figures.steps = steps.size();
  figures.idle = all > 0 ? 1 - static_cast<double>(busy) / static_cast<double>(all) : 0;
  figures.shown = lengths[lengths.size() / 2].second;
  MeasuredStep& shown = steps[figures.shown];
  for (const auto& [rank, spans] : shown.by_rank) figures.ranks.push_back(rank);
  figures.measured = timeline_of(std::move(shown));
  figures.simulated = simulate_step(figures.measured);
  return figures;
}

namespace {

/// What one worker recorded of one round.
struct WorkerRound {
  Interval forward, backward, reduction;
  std::map<int, Interval> buckets;
  std::map<int, std::uint64_t> bytes;
  bool complete() const { return reduction.end != 0 && backward.end != 0 && !buckets.empty(); }
};

using Rounds = std::map<std::uint64_t, std::vector<WorkerRound>>;  ///< by number, then by worker

Rounds collect_rounds(const TraceSet& set) {
  Rounds rounds;
  for (std::size_t w = 0; w < set.workers.size(); ++w) {
    const WorkerTrace& worker = set.workers[w];
    for (const StoredSpan& span : worker.contents.spans) {
      if (span.kind != SpanKind::kBucket) continue;
      std::vector<WorkerRound>& workers = rounds[span.link.id];
      workers.resize(set.workers.size());
      WorkerRound& round = workers[w];
      const Interval times{span.begin, span.end};
      if (span.link.part >= 0) {
        round.buckets[span.link.part] = times;
        round.bytes[span.link.part] = span.link.bytes;
      } else if (const std::string& name = worker.name_of(span); name == "forward") {
        round.forward = times;
      } else if (name == "backward") {
        round.backward = times;
      } else if (name == "reduction") {
        round.reduction = times;
      }
    }
  }
  std::erase_if(rounds, [](const auto& round) {
    return !std::all_of(round.second.begin(), round.second.end(),
                        [](const WorkerRound& worker) { return worker.complete(); });
  });
  return rounds;
}

/// The bucket that some worker starts last of all in a round.
struct LastStart {
  std::int64_t at = std::numeric_limits<std::int64_t>::min();
  std::size_t worker = 0;
  int bucket = 0;
};

class Comparison {
 public:
  Comparison(const TraceSet& set, const TrainingSteps& steps) : set_(set) {
    for (const WorkerTrace& worker : set.workers) result_.workers.push_back({.rank = worker.rank()});
    progress_.resize(set.workers.size());
    if (steps.source == "reductions") {
      for (const TrainingStep& step : steps.steps) steps_[step.number] = &step;
    } else if (steps.source == "spans named step") {
      for (const TrainingStep& step : steps.steps) {
        for (std::size_t w = 0; w < step.by_worker.size(); ++w) {
          if (step.by_worker[w].length() > 0) progress_[w].steps.push_back(step.by_worker[w]);
        }
      }
      for (Progress& one : progress_) std::ranges::sort(one.steps, {}, &Interval::begin);
    }
  }

  void add(std::uint64_t number, const std::vector<WorkerRound>& round) {
    const LastStart last = count_buckets(round);
    for (std::size_t w = 0; w < round.size(); ++w) {
      const WorkerRound& own = round[w];
      ReductionTimes& times = result_.workers[w];
      const std::int64_t exposed = std::max<std::int64_t>(0, own.reduction.end - own.backward.end);
      std::int64_t late = 0;
      if (last.worker != w) late = std::clamp<std::int64_t>(last.at - own.backward.end, 0, exposed);
      if (late > 0) {
        LateBucket& cause = late_[{w, last.worker, last.bucket}];
        cause.time += late;
        ++cause.rounds;
      }
      ++times.rounds;
      times.forward += own.forward.length();
      times.backward += own.backward.length();
      times.late_peer += late;
      times.transfer += exposed - late;
      times.whole += whole_of(number, w, own);
    }
  }

  Reductions finish() {
    for (std::size_t w = 0; w < progress_.size(); ++w) leave_step(w);
    for (auto& [key, cause] : late_) {
      const auto& [worker, late, bucket] = key;
      result_.late.push_back(
          {set_.workers[worker].rank(), set_.workers[late].rank(), bucket, cause.time, cause.rounds});
    }
    std::sort(result_.late.begin(), result_.late.end(),
              [](const LateBucket& a, const LateBucket& b) { return a.time > b.time; });
    return std::move(result_);
  }

 private:
  /// Adds a round to the figures of its buckets and returns the last start of any.
  LastStart count_buckets(const std::vector<WorkerRound>& round) {
    LastStart last;
    std::int64_t backward_end = 0;
    for (const WorkerRound& worker : round) backward_end = std::max(backward_end, worker.backward.end);
    for (const auto& [bucket, own] : round.front().buckets) {
      Interval starts{own.begin, own.begin};
      std::int64_t end = own.end;
      std::size_t latest = 0;
      bool everywhere = true;
      for (std::size_t w = 0; w < round.size(); ++w) {
        const auto found = round[w].buckets.find(bucket);
        everywhere = everywhere && found != round[w].buckets.end();
        if (!everywhere) break;
        if (found->second.begin > starts.end) latest = w;
        starts = {std::min(starts.begin, found->second.begin), std::max(starts.end, found->second.begin)};
        end = std::max(end, found->second.end);
      }
      if (!everywhere) continue;
      if (starts.end > last.at) last = {starts.end, latest, bucket};
      BucketFigures& figures = result_.buckets[bucket];
      figures.bytes = round.front().bytes.at(bucket);
      ++figures.rounds;
      figures.duration += std::max<std::int64_t>(0, end - starts.end);
      figures.skew += starts.length();
      figures.hidden += std::max<std::int64_t>(0, std::min(end, backward_end) - starts.end);
      ++figures.last[set_.workers[latest].rank()];
    }
    return last;
  }

  /// The spans named step of a worker, in order, and how much of them is counted.
  struct Progress {
    std::vector<Interval> steps = {};
    std::size_t next = 0;    ///< step
    std::int64_t until = 0;  ///< what comes before is counted
    bool inside = false;     ///< of the step before `next`, whose end is not counted
  };

  /// Counts the rest of the step in which the last round ended.
  void leave_step(std::size_t w) {
    Progress& own = progress_[w];
    if (!std::exchange(own.inside, false)) return;
    result_.workers[w].whole += std::max<std::int64_t>(0, own.steps[own.next - 1].end - own.until);
  }

  /// The step to which a round belongs: that of the reductions; of a span named step the time since the round before;
  /// otherwise from the forward to the end.
  std::int64_t whole_of(std::uint64_t number, std::size_t w, const WorkerRound& own) {
    if (const auto step = steps_.find(number); step != steps_.end())
      return step->second->by_worker[w].length();
    const std::int64_t begin = own.forward.end != 0 ? own.forward.begin : own.backward.begin;
    Progress& progress = progress_[w];
    while (progress.next < progress.steps.size() && progress.steps[progress.next].begin <= begin) {
      leave_step(w);
      progress.until = progress.steps[progress.next].begin;
      progress.inside = true;
      ++progress.next;
    }
    if (!progress.inside || progress.steps[progress.next - 1].end < begin) return own.reduction.end - begin;
    return own.reduction.end - std::exchange(progress.until, own.reduction.end);
  }

  const TraceSet& set_;
  std::map<std::uint64_t, const TrainingStep*> steps_;
  std::vector<Progress> progress_;  ///< by worker
  std::map<std::tuple<std::size_t, std::size_t, int>, LateBucket> late_;
  Reductions result_;
};

}  // namespace

Reductions examine_reductions(const TraceSet& set, const TrainingSteps& steps) {
  const Rounds rounds = collect_rounds(set);
  if (rounds.empty()) return {};
  Comparison comparison(set, steps);
  for (const auto& [number, round] : rounds) comparison.add(number, round);
  return comparison.finish();
}

namespace {

/// An operation of one group, on the ranks whose traces have it.
struct Operation {
  int last = 0;  ///< rank that started it last
  std::int64_t all_started = 0;
};

/// The operations of a run by what their spans have in common. Several groups may have the same ranks and the same numbers:
/// only spans that overlap in time are those of one operation.
class Operations {
 public:
  explicit Operations(const TraceSet& set) {
    struct Part {
      const StoredSpan* span;
      int rank;
    };
    std::map<Key, std::vector<Part>> parts;
    for (const WorkerTrace& worker : set.workers) {
      for (const StoredSpan& span : worker.contents.spans) {
        if (span.kind == SpanKind::kCollective) parts[key_of(worker, span)].push_back({&span, worker.rank()});
      }
    }
    for (auto& [key, list] : parts) {
      std::ranges::sort(list, {}, [](const Part& part) { return part.span->begin; });
      std::int64_t end = 0;
      ByEnd& operations = operations_[key];
      Operation operation;
      for (const Part& part : list) {
        const bool follows = &part != &list.front() && part.span->begin > end;
        if (follows) operations.emplace(end, operation);
        operation = {part.rank, part.span->begin};
        end = follows ? part.span->end : std::max(end, part.span->end);
      }
      operations.emplace(end, operation);
    }
  }

  const Operation& of(const WorkerTrace& worker, const StoredSpan& span) const {
    return operations_.at(key_of(worker, span)).lower_bound(span.end)->second;
  }

 private:
  using Key = std::tuple<std::int32_t, std::uint64_t, std::string>;  ///< ranks, number, name
  using ByEnd = std::map<std::int64_t, Operation>;

  static Key key_of(const WorkerTrace& worker, const StoredSpan& span) {
    return {span.link.part, span.link.id, worker.name_of(span)};
  }

  std::map<Key, ByEnd> operations_;
};

}  // namespace

std::vector<CollectiveFigures> examine_collectives(const TraceSet& set) {
  const Operations operations(set);
  std::vector<CollectiveFigures> all;
  for (const WorkerTrace& worker : set.workers) {
    CollectiveFigures figures{.rank = worker.rank(), .longest = {}, .later = {}};
    std::vector<Interval> under_way;
    std::map<int, std::vector<Interval>> later;
    std::map<std::string, std::int64_t> sums;
    for (const StoredSpan& span : worker.contents.spans) {
      if (span.kind != SpanKind::kCollective) continue;
      under_way.push_back({span.begin, span.end});
      sums[worker.name_of(span)] += span.end - span.begin;
      const Operation& operation = operations.of(worker, span);
      const std::int64_t end = std::min(span.end, operation.all_started);
      if (end > span.begin) later[operation.last].push_back({span.begin, end});
    }
    figures.under_way = union_length(std::move(under_way));
    const auto longest = std::ranges::max_element(sums, {}, [](const auto& sum) { return sum.second; });
    if (longest != sums.end()) figures.longest = longest->first;
    for (auto& [last, intervals] : later) figures.later[last] = union_length(std::move(intervals));
    all.push_back(std::move(figures));
  }
  return all;
}

namespace {

struct Durations {
  std::vector<std::int64_t> calls, served;
};

struct Pair {
  std::vector<Interval> calls, served;
  std::map<std::string, std::int64_t> by_function;
};

/// Handlers that take turns end at equal distances; those of independent callers come closer.
std::optional<SerializedHandlers> find_serialized(int rank, const std::string& name,
                                                  const std::vector<Interval>& handlers) {
  constexpr std::size_t kLeastHandlers = 20;
  constexpr double kLeastAtATime = 1.5, kLeastDistance = 0.8;
  if (handlers.size() < kLeastHandlers) return std::nullopt;
  std::vector<std::int64_t> ends, distances;
  std::int64_t sum = 0;
  for (const Interval& handler : handlers) {
    ends.push_back(handler.end);
    sum += handler.length();
  }
  std::sort(ends.begin(), ends.end());
  for (std::size_t i = 1; i < ends.size(); ++i) distances.push_back(ends[i] - ends[i - 1]);
  SerializedHandlers found{.rank = rank, .name = name};
  found.busy = union_length(handlers);
  if (found.busy == 0) return std::nullopt;
  found.at_a_time = static_cast<double>(sum) / static_cast<double>(found.busy);
  found.interval = found.busy / std::ssize(handlers);
  found.closest = percentile(distances, 0.1);
  const bool take_turns =
      static_cast<double>(found.closest) >= kLeastDistance * static_cast<double>(found.interval);
  return found.at_a_time >= kLeastAtATime && take_turns ? std::optional(found) : std::nullopt;
}

}  // namespace

std::int64_t percentile(std::vector<std::int64_t>& values, double share) {
  if (values.empty()) return 0;
  const auto rank = static_cast<std::ptrdiff_t>(std::ceil(share * static_cast<double>(values.size()))) - 1;
  const auto at = values.begin() + std::clamp<std::ptrdiff_t>(rank, 0, std::ssize(values) - 1);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

Calls examine_calls(const TraceSet& set) {
  std::map<std::string, Durations> functions;
  std::map<std::pair<int, int>, Pair> pairs;
  std::map<std::pair<int, std::string>, std::vector<Interval>> handlers;  // by rank and function
  Calls result;
  for (const WorkerTrace& worker : set.workers) {
    for (const StoredSpan& span : worker.contents.spans) {
      const int peer = span.link.peer;
      if (peer < 0 || (span.kind != SpanKind::kCall && span.kind != SpanKind::kHandler)) continue;
      const std::string& name = worker.name_of(span);
      const std::int64_t length = span.end - span.begin;
      // A call's span has the bytes of the reply, a handler's those of the request: both came from the peer.
      TrafficFigures& traffic = result.traffic[{peer, worker.rank()}];
      traffic.bytes += span.link.bytes;
      ++traffic.messages;
      if (span.kind == SpanKind::kCall) {
        functions[name].calls.push_back(length);
        Pair& pair = pairs[{worker.rank(), peer}];
        pair.calls.push_back({span.begin, span.end});
        pair.by_function[name] += length;
      } else {
        functions[name].served.push_back(length);
        handlers[{worker.rank(), name}].push_back({span.begin, span.end});
        pairs[{peer, worker.rank()}].served.push_back({span.begin, span.end});
      }
    }
  }
  for (auto& [name, durations] : functions) {
    FunctionFigures figures{.name = name, .calls = durations.calls.size(), .served = durations.served.size()};
    for (const std::int64_t length : durations.calls) figures.total += length;
    figures.p50 = percentile(durations.calls, 0.5);
    figures.p99 = percentile(durations.calls, 0.99);
    figures.longest = percentile(durations.calls, 1);
    figures.served_p50 = percentile(durations.served, 0.5);
    figures.served_p99 = percentile(durations.served, 0.99);
    result.functions.push_back(std::move(figures));
  }
  for (auto& [ranks, pair] : pairs) {
    if (pair.calls.empty()) continue;
    const auto longest = std::max_element(pair.by_function.begin(), pair.by_function.end(),
                                          [](const auto& a, const auto& b) { return a.second < b.second; });
    result.callers.push_back({ranks.first, ranks.second, union_length(std::move(pair.calls)),
                              union_length(std::move(pair.served)), longest->first});
  }
  for (const auto& [where, intervals] : handlers) {
    if (auto found = find_serialized(where.first, where.second, intervals)) {
      result.serialized.push_back(std::move(*found));
    }
  }
  std::stable_sort(result.serialized.begin(), result.serialized.end(),
                   [](const auto& a, const auto& b) { return a.busy > b.busy; });
  std::stable_sort(result.functions.begin(), result.functions.end(),
                   [](const auto& a, const auto& b) { return a.total > b.total; });
  std::stable_sort(result.callers.begin(), result.callers.end(),
                   [](const auto& a, const auto& b) { return a.waiting > b.waiting; });
  return result;
}

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
