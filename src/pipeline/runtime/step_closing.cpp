#include "pipeline/runtime/step_closing.h"

#include <algorithm>
#include <utility>

namespace torchspan::pipeline {

namespace {

/// The micro-batches whose weight gradients are left, after each action of a worker.
void add_weight_inputs(const std::vector<schedule::ActionSpan>& spans, schedule::Timeline& measured) {
  std::vector<double> waiting;
  double now = 0, peak = 0;
  for (const schedule::ActionSpan& span : spans) {
    if (span.action.kind == schedule::ActionKind::kInputGradient) peak = std::max(peak, ++now);
    if (span.action.kind == schedule::ActionKind::kWeightGradient) --now;
    waiting.push_back(now);
  }
  measured.weight_inputs.push_back(std::move(waiting));
  measured.peak_weight_inputs.push_back(peak);
}

}  // namespace

StepClosing::StepClosing(const LocalPipeline& local, StepId id) : local_(local) {
  result_.id = id;
  result_.peaks.resize(local.ranks.size());
  result_.actions.resize(local.ranks.size());
}

void StepClosing::add(const PartDone& part) {
  const auto worker = static_cast<std::size_t>(part.worker);
  if (part.worker < 0 || worker >= local_.ranks.size()) return;
  ++parts_;
  if (part.worker == local_.last_worker()) result_.loss = part.loss;
  result_.peaks[worker] = part.peak;
  result_.actions[worker] = part.actions;
}

void StepClosing::set(StepClosed result) {
  result_ = std::move(result);
  closed_ = true;
}

bool StepClosing::complete() const {
  return local_.me == local_.first_worker() ? parts_ >= static_cast<int>(local_.ranks.size()) : closed_;
}

void StepClosing::reset() {
  parts_ = 0;
  closed_ = false;
}

StepReport StepClosing::report(int micro_batches, const schedule::Table* table) const {
  StepReport report;
  report.step = result_.id.step;
  report.micro_batches = micro_batches;
  if (table != nullptr) report.table = *table;
  schedule::Timeline& measured = report.measured;
  measured.name = "measured";
  for (std::size_t worker = 0; worker < result_.actions.size(); ++worker) {
    std::vector<schedule::ActionSpan> spans;
    std::vector<double> live;
    Duration busy{0};
    for (const RanAction& ran : result_.actions[worker]) {
      spans.push_back({{ran.kind, ran.layer_range, ran.micro_batch}, Duration(ran.start), Duration(ran.end)});
      live.push_back(ran.live);
      busy += Duration(ran.end - ran.start);
      measured.makespan = std::max(measured.makespan, Duration(ran.end));
    }
    add_weight_inputs(spans, measured);
    measured.spans.push_back(std::move(spans));
    measured.live.push_back(std::move(live));
    measured.peak_live.push_back(result_.peaks[worker]);
    measured.idle.push_back(busy);  // completed below, when the makespan is known
  }
  for (Duration& idle : measured.idle) idle = measured.makespan - idle;
  return report;
}

}  // namespace torchspan::pipeline
