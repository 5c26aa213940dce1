#include "pipeline/runtime/statistics_exchange.h"

#include <fmt/format.h>
#include <utility>

#include <torch/nn/module.h>

namespace torchspan::pipeline {

StatisticsExchange::StatisticsExchange(const LocalPipeline& local, StepId id) : local_(local), id_(id) {
  if (local.grid.count() <= 1) return;
  for (const BuiltLayer& layer : local.layers) {
    if (!layer.module) continue;
    for (const auto& module : layer.module->modules()) {
      if (auto* statistics = dynamic_cast<StepStatistics*>(module.get())) modules_.push_back(statistics);
    }
  }
}

void StatisticsExchange::send() {
  sent_ = true;
  if (modules_.empty()) return;
  ReplicaStatistics mine{id_, local_.grid.mine, {}};
  for (const StepStatistics* module : modules_) mine.gathered.push_back(module->gathered());
  for (int other = 0; other < local_.grid.count(); ++other) {
    if (other != local_.grid.mine) local_.post_to_replica(other, mine);
  }
  parts_[local_.grid.mine] = std::move(mine.gathered);
}

void StatisticsExchange::accept(ReplicaStatistics& event) {
  const bool known = event.replica >= 0 && event.replica < local_.grid.count() &&
                     event.replica != local_.grid.mine && !parts_.contains(event.replica) &&
                     event.gathered.size() == modules_.size();
  if (!known) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("statistics of {} modules from replica {} do not belong to this worker, which has "
                    "{} such modules in replica {}",
                    event.gathered.size(), event.replica, modules_.size(), local_.grid.mine));
  }
  parts_[event.replica] = std::move(event.gathered);
}

bool StatisticsExchange::complete() const {
  return !sent_ || modules_.empty() || static_cast<int>(parts_.size()) == local_.grid.count();
}

void StatisticsExchange::finish() {
  if (!std::exchange(sent_, false) || modules_.empty()) return;
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    std::vector<std::vector<at::Tensor>> by_replica;
    for (auto& [replica, gathered] : parts_) by_replica.push_back(std::move(gathered[i]));
    modules_[i]->set_gathered(by_replica);
  }
}

}  // namespace torchspan::pipeline
