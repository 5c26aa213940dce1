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

/// The operations of a run by what their spans have in common. Several groups may have the same ranks and the same numbers:
/// only spans that overlap in time are those of one operation.
class Operations {
 public:
  explicit Operations(const TraceSet& set) {
    struct Part {
      const StoredSpan* span;
      int rank;
    };
    std::map<Key, std::vector<Part>> parts;
    for (const WorkerTrace& worker : set.workers) {
      for (const StoredSpan& span : worker.contents.spans) {
        if (span.kind == SpanKind::kCollective) parts[key_of(worker, span)].push_back({&span, worker.rank()});
      }
    }
    for (auto& [key, list] : parts) {
      std::ranges::sort(list, {}, [](const Part& part) { return part.span->begin; });
      std::int64_t end = 0;
      ByEnd& operations = operations_[key];
      Operation operation;
      for (const Part& part : list) {
        const bool follows = &part != &list.front() && part.span->begin > end;
        if (follows) operations.emplace(end, operation);
        operation = {part.rank, part.span->begin};
        end = follows ? part.span->end : std::max(end, part.span->end);
      }
      operations.emplace(end, operation);
    }
  }

  const Operation& of(const WorkerTrace& worker, const StoredSpan& span) const {
    return operations_.at(key_of(worker, span)).lower_bound(span.end)->second;
  }

 private:
  using Key = std::tuple<std::int32_t, std::uint64_t, std::string>;  ///< ranks, number, name
  using ByEnd = std::map<std::int64_t, Operation>;

  static Key key_of(const WorkerTrace& worker, const StoredSpan& span) {
    return {span.link.part, span.link.id, worker.name_of(span)};
  }

  std::map<Key, ByEnd> operations_;
};

}  // namespace

std::vector<CollectiveFigures> examine_collectives(const TraceSet& set) {
  const Operations operations(set);
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
      const Operation& operation = operations.of(worker, span);
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
