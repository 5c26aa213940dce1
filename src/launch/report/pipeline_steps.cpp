#include "launch/report/pipeline_steps.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <map>
#include <string>

#include <torchspan/core/error.h>

namespace torchspan::launch {
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

}  // namespace torchspan::launch
