#include "launch/report/verdict.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <map>
#include <optional>
#include <utility>

#include "launch/display/board.h"

namespace torchspan::launch {
namespace {

constexpr double kLeastShare = 0.05;

double ratio(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

/// The program's span in which a rank spends more time per step than the others, and both times.
struct SlowSpan {
  std::string name = {};
  double own = 0, others = 0;
  double excess() const { return own - others; }
};

/// Among nested spans of about the same excess, the innermost one. Nullopt if the rank is not slower in any.
std::optional<SlowSpan> slowest_span(const TraceSet& set, int rank, double steps) {
  std::map<std::string, SlowSpan> spans;
  for (const WorkerTrace& worker : set.workers) {
    for (const StoredSpan& span : worker.contents.spans) {
      const std::string& name = worker.name_of(span);
      if (span.kind != SpanKind::kUser || name == "step" || name == "progress") continue;
      SlowSpan& times = spans[name];
      const double length = static_cast<double>(span.end - span.begin) / steps;
      (worker.rank() == rank ? times.own : times.others) += length;
    }
  }
  double most = 0;
  for (auto& [name, times] : spans) {
    times.name = name;
    times.others /= std::max<double>(1, static_cast<double>(set.workers.size()) - 1);
    most = std::max(most, times.excess());
  }
  std::optional<SlowSpan> slowest;
  for (const auto& [name, times] : spans) {
    const bool nearly = most > 0 && times.excess() >= 0.9 * most;
    if (nearly && (!slowest || times.own < slowest->own)) slowest = times;
  }
  return slowest;
}

/// " It spends 10.0 ms in 'augment'; the others spend 0.1 ms there."; empty if that explains less than half of the excess.
std::string span_of_excess(const TraceSet& set, int rank, double steps, double excess) {
  const std::optional<SlowSpan> slow = slowest_span(set, rank, steps);
  if (!slow || slow->excess() < 0.5 * excess) return "";
  return fmt::format(" It spends {} in '{}'; the others spend {} there.", format_time(slow->own), slow->name,
                     format_time(slow->others));
}

/// Where the late rank spends more time per step than the others do on average.
std::string reason_of_lateness(const TraceSet& set, const Reductions& reductions, int late) {
  const ReductionTimes* slow = nullptr;
  double others = 0;
  std::array<double, 3> mean{};
  const auto parts = [](const ReductionTimes& times) {
    const double rounds = static_cast<double>(std::max<std::uint64_t>(times.rounds, 1));
    return std::array<double, 3>{static_cast<double>(times.forward) / rounds,
                                 static_cast<double>(times.backward) / rounds,
                                 static_cast<double>(times.other()) / rounds};
  };
  for (const ReductionTimes& times : reductions.workers) {
    if (times.rank == late) {
      slow = &times;
      continue;
    }
    ++others;
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += parts(times)[i];
  }
  if (slow == nullptr || others == 0) return "";
  constexpr std::array kWhere = {"in forward", "in backward", "outside forward, backward and reduction"};
  std::size_t worst = 0;
  std::array<double, 3> excess{};
  for (std::size_t i = 0; i < mean.size(); ++i) {
    excess[i] = parts(*slow)[i] - mean[i] / others;
    if (excess[i] > excess[worst]) worst = i;
  }
  if (excess[worst] <= 0) return "";
  return fmt::format("Per step, rank {} spends {} {}; the other ranks spend {} there.", late,
                     format_time(parts(*slow)[worst]), kWhere[worst], format_time(mean[worst] / others)) +
         span_of_excess(set, late, static_cast<double>(std::max<std::uint64_t>(slow->rounds, 1)),
                        excess[worst]);
}

/// "Rank 0 waits", "Ranks 0,1,3 wait".
std::string subject(const std::vector<int>& ranks, const char* one, const char* many) {
  return fmt::format("Rank{} {} {}", ranks.size() == 1 ? "" : "s", format_ranks(ranks),
                     ranks.size() == 1 ? one : many);
}

/// Ranks with the same cause, and the largest and smallest share of them.
struct SharedCause {
  std::vector<int> ranks = {};
  double least = 1, most = 0;

  void add(int rank, double share) {
    if (share < kLeastShare) return;
    ranks.push_back(rank);
    least = std::min(least, share);
    most = std::max(most, share);
  }
  /// "29 %", "12 to 29 %".
  std::string text() const {
    const std::string high = fmt::format("{:.0f} %", 100 * most);
    return fmt::format("{:.0f} %", 100 * least) == high ? high
                                                        : fmt::format("{:.0f} to {}", 100 * least, high);
  }
};

void judge_late_ranks(const TraceSet& set, const Reductions& reductions, std::vector<RunFinding>& findings) {
  std::map<int, std::map<int, std::int64_t>> waits;  // time by late and waiting rank
  std::map<int, int> worst;                          // bucket with the longest wait, by late rank
  for (const LateBucket& late : reductions.late) {   // longest first
    waits[late.late][late.waits] += late.time;
    worst.try_emplace(late.late, late.bucket);
  }
  for (const auto& [late, times] : waits) {
    SharedCause cause;
    for (const ReductionTimes& worker : reductions.workers) {
      const auto time = times.find(worker.rank);
      if (time != times.end()) cause.add(worker.rank, ratio(time->second, worker.whole));
    }
    if (cause.ranks.empty()) continue;
    findings.push_back({cause.most,
                        fmt::format("{} {} of {} step time for rank {}, mostly for its bucket {}.",
                                    subject(cause.ranks, "waits", "wait"), cause.text(),
                                    cause.ranks.size() == 1 ? "its" : "their", late, worst.at(late)),
                        reason_of_lateness(set, reductions, late)});
  }
}

void judge_reductions(const TraceSet& set, const RunFigures& figures, std::vector<RunFinding>& findings) {
  judge_late_ranks(set, figures.reductions, findings);
  SharedCause cause;
  for (const ReductionTimes& times : figures.reductions.workers) {
    cause.add(times.rank, ratio(times.transfer, times.whole));
  }
  if (cause.ranks.empty()) return;
  findings.push_back(
      {cause.most,
       fmt::format("{} {} of {} step time on reductions that backward does not hide.",
                   subject(cause.ranks, "spends", "spend"), cause.text(),
                   cause.ranks.size() == 1 ? "its" : "their"),
       "Larger batches, another bucket size (bucket_cap_mb), fp16 or bf16 hooks, or no_sync() reduce this."});
}

/// The rank that computes longer than the others in the step that is shown; empty if the ranks are balanced.
std::string reason_of_imbalance(const PipelineFigures& pipeline) {
  const schedule::Timeline& step = pipeline.measured;
  double mean = 0, most = 0;
  std::size_t worst = 0;
  for (std::size_t row = 0; row < step.idle.size(); ++row) {
    const auto busy = static_cast<double>((step.makespan - step.idle[row]).count());
    mean += busy / static_cast<double>(step.idle.size());
    if (busy > most) worst = row;
    most = std::max(most, busy);
  }
  if (most < 1.1 * mean) return "";
  return fmt::format("Rank {} computes {} per step, {:.0f} % more than the mean: move layers to other ranks.",
                     pipeline.ranks[worst], format_time(most), 100 * (most / mean - 1));
}

void judge_pipeline(const RunFigures& figures, std::vector<RunFinding>& findings) {
  if (!figures.pipeline) return;
  const PipelineFigures& pipeline = *figures.pipeline;
  std::string text =
      fmt::format("Pipeline workers are idle in {:.0f} % of their step time", 100 * pipeline.idle);
  std::string advice;
  if (pipeline.simulated) {
    const double plan = schedule::idle_share(*pipeline.simulated);
    text += fmt::format("; with the same actions and no transfers the schedule itself leaves {:.0f} %",
                        100 * plan);
    advice =
        pipeline.idle - plan > 0.1
            ? "The difference is waiting for messages or for a busy processor, not the schedule."
            : "Most of it is the schedule's: use more micro-batches or compare schedules with 'torchspan "
              "schedule best'.";
  }
  if (pipeline.simulated && pipeline.simulated->makespan > pipeline.measured.makespan) {
    text += fmt::format("; the simulated step is longer than the measured one ({} and {})",
                        format_time(static_cast<double>(pipeline.simulated->makespan.count())),
                        format_time(static_cast<double>(pipeline.measured.makespan.count())));
    if (!advice.empty()) advice += " ";
    advice +=
        "An action sends its result before it ends, so that the next one overlaps with it; the simulation "
        "starts the next one "
        "after its end, at the mean time of its kind. Compare idle shares, not lengths.";
  }
  const std::string imbalance = reason_of_imbalance(pipeline);
  if (!advice.empty() && !imbalance.empty()) advice += " ";
  advice += imbalance;
  findings.push_back({pipeline.idle, text + ".", advice});
}

/// The share is the time that the handlers spend in waiting for each other.
void judge_serialized_handlers(const TraceSet& set, const RunFigures& figures,
                               std::vector<RunFinding>& findings) {
  for (const SerializedHandlers& handlers : figures.calls.serialized) {
    findings.push_back(
        {ratio(handlers.busy, set.length) * (1 - 1 / handlers.at_a_time),
         fmt::format("Handlers of '{}' on rank {} run {:.1f} at a time, but end one after another, every {}.",
                     handlers.name, handlers.rank, handlers.at_a_time,
                     format_time(static_cast<double>(handlers.interval))),
         "They take turns: look for a lock that they hold, or for a processor that they share."});
  }
}

void judge_calls(const TraceSet& set, const RunFigures& figures, std::vector<RunFinding>& findings) {
  judge_serialized_handlers(set, figures, findings);
  for (const CallerFigures& pair : figures.calls.callers) {
    if (pair.caller == pair.callee) continue;
    const double share = ratio(pair.waiting, set.length);
    findings.push_back(
        {share,
         fmt::format("Rank {} has calls to rank {} under way in {:.0f} % of the run, mostly '{}'.",
                     pair.caller, pair.callee, 100 * share, pair.longest),
         fmt::format(
             "Handlers there run during {:.0f} % of that time; the rest is transfer, queueing and waking up.",
             100 * std::min(1.0, ratio(pair.served, pair.waiting)))});
  }
}

/// Of a run without reductions, pipelines and calls that take time: the rank with the most operations, and the longest
/// time of a rank for which another one starts them last.
void judge_collectives(const TraceSet& set, const RunFigures& figures, std::vector<RunFinding>& findings) {
  const CollectiveFigures* most = nullptr;
  const CollectiveFigures* early = nullptr;
  std::pair<int, std::int64_t> late;  // rank and time
  for (const CollectiveFigures& rank : figures.collectives) {
    if (most == nullptr || rank.under_way > most->under_way) most = &rank;
    for (const auto& [last, time] : rank.later) {
      if (time <= late.second) continue;
      late = {last, time};
      early = &rank;
    }
  }
  if (most == nullptr) return;
  const double share = ratio(most->under_way, set.length), later = ratio(late.second, set.length);
  findings.push_back(
      {share,
       fmt::format("Collective operations are under way on rank {} in {:.0f} % of the run, mostly '{}'.",
                   most->rank, 100 * share, most->longest),
       "Some of this time overlaps with computation: the timeline shows when."});
  if (early == nullptr) return;
  findings.push_back(
      {later,
       fmt::format("In {:.0f} % of the run, rank {} has collective operations under way that rank {} has not "
                   "started.",
                   100 * later, early->rank, late.first),
       fmt::format("Rank {} starts them last: it has more work before them, or shares its processor.",
                   late.first) +
           span_of_excess(set, late.first,
                          std::max<double>(1, static_cast<double>(figures.steps.steps.size())),
                          static_cast<double>(late.second) /
                              std::max<double>(1, static_cast<double>(figures.steps.steps.size())))});
}

}  // namespace

std::string format_time(double nanoseconds) {
  if (nanoseconds < 1e3) return fmt::format("{:.0f} ns", nanoseconds);
  if (nanoseconds < 1e6) return fmt::format("{:.1f} us", nanoseconds / 1e3);
  if (nanoseconds < 1e9) return fmt::format("{:.1f} ms", nanoseconds / 1e6);
  return fmt::format("{:.2f} s", nanoseconds / 1e9);
}

std::string format_bytes(std::uint64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

RunFigures examine_run(const TraceSet& set) {
  RunFigures figures;
  figures.steps = find_steps(set);
  figures.reductions = examine_reductions(set, figures.steps);
  figures.calls = examine_calls(set);
  figures.pipeline = examine_pipeline(set);
  figures.modules = examine_modules(set);
  figures.collectives = examine_collectives(set);
  return figures;
}

std::vector<RunFinding> judge_run(const TraceSet& set, const RunFigures& figures) {
  std::vector<RunFinding> findings;
  judge_reductions(set, figures, findings);
  judge_pipeline(figures, findings);
  if (!figures.pipeline) judge_calls(set, figures, findings);  // a pipeline's messages overlap its work
  const auto is_small = [](const RunFinding& finding) { return finding.share < kLeastShare; };
  std::erase_if(findings, is_small);
  if (findings.empty() && !figures.pipeline) judge_collectives(set, figures, findings);
  std::erase_if(findings, is_small);
  std::stable_sort(findings.begin(), findings.end(),
                   [](const RunFinding& a, const RunFinding& b) { return a.share > b.share; });
  return findings;
}

}  // namespace torchspan::launch
