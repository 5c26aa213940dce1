#include "launch/report/collectives.h"

#include <algorithm>
#include <tuple>

#include "launch/report/steps.h"

namespace torchspan::launch {
namespace {

/// An operation of one group, on the ranks whose traces have it.
struct Operation {
  int last = 0;  ///< rank that started it last
  std::int64_t all_started = 0;
};
using OperationKey = std::tuple<std::int32_t, std::uint64_t, std::string>;  ///< group, number, name

OperationKey key_of(const WorkerTrace& worker, const StoredSpan& span) {
  return {span.link.part, span.link.id, worker.name_of(span)};
}

std::map<OperationKey, Operation> match_operations(const TraceSet& set) {
  std::map<OperationKey, Operation> operations;
  for (const WorkerTrace& worker : set.workers) {
    for (const StoredSpan& span : worker.contents.spans) {
      if (span.kind != SpanKind::kCollective) continue;
      const auto [place, is_new] = operations.try_emplace(key_of(worker, span));
      if (!is_new && span.begin <= place->second.all_started) continue;
      place->second = {worker.rank(), span.begin};
    }
  }
  return operations;
}

}  // namespace

std::vector<CollectiveFigures> examine_collectives(const TraceSet& set) {
  const std::map<OperationKey, Operation> operations = match_operations(set);
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
      const Operation& operation = operations.at(key_of(worker, span));
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

}  // namespace torchspan::launch
