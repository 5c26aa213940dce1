#include "pipeline/runtime/replica_begins.h"

#include <fmt/format.h>
#include <numeric>
#include <string>

namespace torchspan::pipeline {
namespace {

std::int64_t total_rows(const StepBegin& begin) {
  return std::accumulate(begin.rows.begin(), begin.rows.end(), std::int64_t{0});
}

}  // namespace

void announce_to_replicas(const LocalPipeline& local, const StepBegin& begin) {
  const ReplicaBegin mine{begin.id,          local.grid.mine,      begin.kind,
                          total_rows(begin), begin.gradient_scale, begin.no_sync};
  for (int replica = 0; replica < local.grid.count(); ++replica) {
    if (replica == local.grid.mine) continue;
    for (const std::uint32_t rank : local.grid.ranks[static_cast<std::size_t>(replica)])
      post(local.worker, local.event_queue, rank, mine);
  }
}

ReplicaBegins::ReplicaBegins(const LocalPipeline& local, const StepBegin& begin)
    : local_(local),
      id_(begin.id),
      kind_(begin.kind),
      gradient_scale_(begin.gradient_scale),
      no_sync_(begin.no_sync) {
  rows_[local.grid.mine] = total_rows(begin);
}

void ReplicaBegins::accept(const ReplicaBegin& event) {
  if (event.replica < 0 || event.replica >= local_.grid.count() || event.rows < 1 ||
      rows_.contains(event.replica)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("the beginning of replica {} does not belong to this worker, of replica {}",
                            event.replica, local_.grid.mine));
  }
  const auto refuse = [&](const std::string& difference) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("the replicas of pipeline '{}' {} (worker '{}' of replica {} and worker '{}' of "
                    "replica {}); do the same in all replicas",
                    local_.options.name, difference, local_.worker.name(), local_.grid.mine,
                    local_.grid.names_of(local_.me)[static_cast<std::size_t>(event.replica)], event.replica));
  };
  if (event.kind != kind_)
    refuse(fmt::format("call different functions in step {}, {} and {}", id_.step, call_of(kind_),
                       call_of(event.kind)));
  if (event.gradient_scale != gradient_scale_) {
    refuse(fmt::format("have different StepOptions::gradient_scale in step {}, {} and {}", id_.step,
                       gradient_scale_, event.gradient_scale));
  }
  if (event.no_sync != no_sync_)
    refuse(fmt::format("have different StepOptions::no_sync in step {}, {} and {}", id_.step, no_sync_,
                       event.no_sync));
  rows_[event.replica] = event.rows;
}

double ReplicaBegins::own_weight() const {
  double total = 0;
  for (const auto& [replica, rows] : rows_) total += static_cast<double>(rows);
  return static_cast<double>(own_rows() * local_.grid.count()) / total;
}

}  // namespace torchspan::pipeline
