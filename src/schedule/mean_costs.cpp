#include <map>
#include <utility>

#include <torchspan/schedule.h>

namespace torchspan::schedule {
namespace {

/// Zero for actions that never ran.
struct Mean {
  Duration sum{0};
  int count = 0;
  Duration value() const { return count == 0 ? Duration{0} : sum / count; }
};

}  // namespace

std::vector<Costs> mean_costs(const Timeline& measured, int stages) {
  std::map<std::pair<int, ActionKind>, Mean> means;
  for (const auto& spans : measured.spans) {
    for (const ActionSpan& span : spans) {
      Mean& mean = means[{span.action.stage, span.action.kind}];
      mean.sum += span.end - span.start;
      ++mean.count;
    }
  }
  std::vector<Costs> costs;
  for (int stage = 0; stage < stages; ++stage) {
    const auto mean = [&](ActionKind kind) { return means[{stage, kind}].value(); };
    // Some schedules split only some backwards of a stage; the split ones have both costs.
    const bool split = means.contains({stage, ActionKind::kInputGradient});
    costs.push_back({.forward = mean(ActionKind::kForward),
                     .input_gradient = mean(split ? ActionKind::kInputGradient : ActionKind::kBackward),
                     .weight_gradient = mean(ActionKind::kWeightGradient)});
  }
  return costs;
}

}  // namespace torchspan::schedule
