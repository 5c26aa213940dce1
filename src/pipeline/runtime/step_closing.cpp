#include "pipeline/runtime/step_closing.h"

#include <algorithm>
#include <fmt/format.h>
#include <numeric>
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

StepClosing::StepClosing(const LocalPipeline& local, const StepBegin& begin)
    : local_(local), rows_(std::accumulate(begin.rows.begin(), begin.rows.end(), std::int64_t{0})) {
  result_.id = begin.id;
  result_.peaks.resize(local.ranks().size());
  result_.actions.resize(local.ranks().size());
}

void StepClosing::add(const PartDone& part) {
  const auto worker = static_cast<std::size_t>(part.worker);
  if (part.worker < 0 || worker >= local_.ranks().size()) return;
  ++parts_;
  if (part.worker == local_.last_worker()) result_.loss = part.loss;
  result_.peaks[worker] = part.peak;
  result_.actions[worker] = part.actions;
  if (parts_ < static_cast<int>(local_.ranks().size())) return;
  const ReplicaDone mine{result_.id, local_.grid.mine, part_, rows_, result_.loss};
  dones_[{part_, mine.replica}] = mine;
  for (int other = 0; other < local_.grid.count(); ++other) {
    if (other != local_.grid.mine) local_.post_to_replica(other, mine);
  }
  average_losses();
}

void StepClosing::add(const ReplicaDone& done) {
  const bool known = done.replica >= 0 && done.replica < local_.grid.count() &&
                     done.replica != local_.grid.mine && done.part >= part_ && done.part <= 1 &&
                     done.rows > 0 && local_.me == local_.first_worker();
  if (!known) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("the end of replica {} does not belong to this worker, of replica {}",
                            done.replica, local_.grid.mine));
  }
  dones_[{done.part, done.replica}] = done;
  average_losses();
}

int StepClosing::replicas_done() const {
  return static_cast<int>(std::count_if(dones_.begin(), dones_.end(),
                                        [this](const auto& done) { return done.first.first == part_; }));
}

void StepClosing::average_losses() {
  if (!complete()) return;
  double rows = 0, sum = 0;
  for (const auto& [key, done] : dones_) {
    if (key.first != part_) continue;
    rows += static_cast<double>(done.rows);
    sum += static_cast<double>(done.rows) * done.loss;
  }
  if (local_.grid.count() > 1) result_.loss = sum / rows;
}

void StepClosing::set(StepClosed result) {
  result_ = std::move(result);
  closed_ = true;
}

bool StepClosing::complete() const {
  if (local_.me != local_.first_worker()) return closed_;
  return parts_ >= static_cast<int>(local_.ranks().size()) && replicas_done() == local_.grid.count();
}

void StepClosing::reset() {
  ++part_;
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
