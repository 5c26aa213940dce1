#include "launch/report/reductions.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

namespace torchspan::launch {
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

}  // namespace torchspan::launch
