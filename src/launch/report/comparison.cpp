#include "launch/report/comparison.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fmt/format.h>
#include <map>
#include <set>

namespace torchspan::launch {
namespace {

using Unit = ComparedFigure::Unit;

/// Median of some durations, and half the width of its notch: medians whose notches do not overlap differ at about the
/// 5 % level.
struct Notch {
  double median = 0;
  double half = 0;
};

double quantile(const std::vector<double>& sorted, double share) {
  const double place = share * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(place);
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (place - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

std::optional<Notch> notch_of_steps(const TrainingSteps& steps) {
  std::vector<double> lengths;
  for (const TrainingStep& step : steps.steps) {
    std::int64_t longest = 0;
    for (const Interval& part : step.by_worker) longest = std::max(longest, part.length());
    lengths.push_back(static_cast<double>(longest));
  }
  if (lengths.empty()) return std::nullopt;
  std::sort(lengths.begin(), lengths.end());
  constexpr double kNotch = 1.57;
  return Notch{quantile(lengths, 0.5), kNotch * (quantile(lengths, 0.75) - quantile(lengths, 0.25)) /
                                           std::sqrt(static_cast<double>(lengths.size()))};
}

/// Sums over all ranks of how they spend a step of data-parallel training.
struct StepParts {
  double rounds = 0, forward = 0, backward = 0, late_peer = 0, transfer = 0, other = 0;
};

StepParts sum_parts(const Reductions& reductions) {
  StepParts sum;
  for (const ReductionTimes& times : reductions.workers) {
    sum.rounds += static_cast<double>(times.rounds);
    sum.forward += static_cast<double>(times.forward);
    sum.backward += static_cast<double>(times.backward);
    sum.late_peer += static_cast<double>(times.late_peer);
    sum.transfer += static_cast<double>(times.transfer);
    sum.other += static_cast<double>(times.other());
  }
  return sum;
}

double bytes_of_calls(const Calls& calls) {
  double sum = 0;
  for (const auto& [ranks, figures] : calls.traffic) sum += static_cast<double>(figures.bytes);
  return sum;
}

/// The largest resident memory of any process; 0 if the trace has none.
double peak_memory(const TraceSet& set) {
  double most = 0;
  for (const WorkerTrace& worker : set.workers) {
    for (const CounterSample& sample : worker.contents.counters) {
      const auto found = sample.values.find("process.resident_bytes");
      if (found != sample.values.end()) most = std::max(most, static_cast<double>(found->second));
    }
  }
  return most;
}

class Comparing {
 public:
  Comparing(const TraceSet& before, const RunFigures& before_figures, const TraceSet& after,
            const RunFigures& after_figures)
      : before_(before), after_(after), old_(before_figures), new_(after_figures) {}

  RunComparison compare() {
    result_.run = before_.workers.front().contents.identity.run;
    compare_steps();
    compare_parts();
    if (old_.pipeline && new_.pipeline)
      add("idle time of pipeline workers", Unit::kShare, old_.pipeline->idle, new_.pipeline->idle);
    compare_functions();
    if (!old_.calls.traffic.empty() && !new_.calls.traffic.empty())
      add("bytes of all calls", Unit::kBytes, bytes_of_calls(old_.calls), bytes_of_calls(new_.calls));
    const double old_peak = peak_memory(before_), new_peak = peak_memory(after_);
    if (old_peak > 0 && new_peak > 0) add("largest memory of a process", Unit::kBytes, old_peak, new_peak);
    add_notes();
    return std::move(result_);
  }

 private:
  void add(std::string name, Unit unit, double before, double after, std::optional<bool> is_clear = {}) {
    ComparedFigure figure;
    figure.name = std::move(name);
    figure.unit = unit;
    figure.before = before;
    figure.after = after;
    figure.is_clear = is_clear;
    result_.figures.push_back(std::move(figure));
  }

  void compare_steps() {
    const auto before = notch_of_steps(old_.steps), after = notch_of_steps(new_.steps);
    if (!before || !after) return;
    if (old_.steps.source != new_.steps.source) {
      result_.notes.push_back(
          fmt::format("steps are not compared: those of the earlier run come from {}, those of "
                      "this one from {}",
                      old_.steps.source, new_.steps.source));
      return;
    }
    const bool is_clear = std::abs(before->median - after->median) > before->half + after->half;
    add("median step", Unit::kTime, before->median, after->median, is_clear);
  }

  void compare_parts() {
    const StepParts before = sum_parts(old_.reductions), after = sum_parts(new_.reductions);
    if (before.rounds == 0 || after.rounds == 0) return;
    const auto add_part = [&](const char* name, double StepParts::*part) {
      add(name, Unit::kTime, before.*part / before.rounds, after.*part / after.rounds);
    };
    add_part("forward, per step and rank", &StepParts::forward);
    add_part("backward, per step and rank", &StepParts::backward);
    add_part("waiting for a late rank, per step and rank", &StepParts::late_peer);
    add_part("reduction not hidden, per step and rank", &StepParts::transfer);
    add_part("outside of these, per step and rank", &StepParts::other);
  }

  /// The functions that take the most time in either run.
  void compare_functions() {
    constexpr std::size_t kMost = 10;
    std::map<std::string, const FunctionFigures*> earlier;
    for (const FunctionFigures& figures : old_.calls.functions) earlier[figures.name] = &figures;
    std::size_t shown = 0;
    for (const FunctionFigures& figures : new_.calls.functions) {
      const auto found = earlier.find(figures.name);
      if (found == earlier.end() || figures.calls == 0 || found->second->calls == 0) continue;
      if (++shown > kMost) break;
      const FunctionFigures& old = *found->second;
      add(fmt::format("call of '{}', p50", figures.name), Unit::kTime, static_cast<double>(old.p50),
          static_cast<double>(figures.p50));
      add(fmt::format("call of '{}', p99", figures.name), Unit::kTime, static_cast<double>(old.p99),
          static_cast<double>(figures.p99));
    }
  }

  void add_notes() {
    if (before_.workers.size() != after_.workers.size()) {
      result_.notes.push_back(
          fmt::format("the numbers of workers differ: {} in the earlier run, {} in this one",
                      before_.workers.size(), after_.workers.size()));
    }
    std::set<std::string> old_hosts, new_hosts;
    for (const WorkerTrace& worker : before_.workers) old_hosts.insert(worker.contents.identity.host);
    for (const WorkerTrace& worker : after_.workers) new_hosts.insert(worker.contents.identity.host);
    if (old_hosts != new_hosts) result_.notes.emplace_back("the runs used different hosts");
    if (result_.figures.empty()) result_.notes.emplace_back("the runs have no figures in common");
  }

  const TraceSet& before_;
  const TraceSet& after_;
  const RunFigures& old_;
  const RunFigures& new_;
  RunComparison result_;
};

}  // namespace

std::string ComparedFigure::change() const {
  constexpr double kPercent = 100, kManyTimes = 2;
  if (unit == Unit::kShare) {
    return fmt::format("{:+.0f} point{}", kPercent * (after - before),
                       std::lround(std::abs(kPercent * (after - before))) == 1 ? "" : "s");
  }
  if (before <= 0) return "–";
  const double ratio = after / before;
  return ratio >= kManyTimes ? fmt::format("{:.1f} times", ratio)
                             : fmt::format("{:+.0f} %", kPercent * (ratio - 1));
}

std::string ComparedFigure::text(double value) const {
  switch (unit) {
    case Unit::kTime:
      return format_time(value);
    case Unit::kBytes:
      return format_bytes(static_cast<std::uint64_t>(value));
    case Unit::kShare:
      return fmt::format("{:.0f} %", 100 * value);
  }
  return "";
}

RunComparison compare_runs(const TraceSet& before, const RunFigures& before_figures, const TraceSet& after,
                           const RunFigures& after_figures) {
  return Comparing(before, before_figures, after, after_figures).compare();
}

std::string describe_comparison(const RunComparison& comparison) {
  std::string text = "compared with the earlier run:\n";
  for (const ComparedFigure& figure : comparison.figures) {
    text += fmt::format("  {:>9}  {}: {}, before {}{}\n", figure.change(), figure.name,
                        figure.text(figure.after), figure.text(figure.before),
                        figure.is_clear.value_or(true) ? "" : "; the steps of each run vary more than that");
  }
  for (const std::string& note : comparison.notes) text += fmt::format("note: {}\n", note);
  return text;
}

}  // namespace torchspan::launch
