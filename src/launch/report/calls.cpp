#include "launch/report/calls.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "launch/report/steps.h"

namespace torchspan::launch {
namespace {

struct Durations {
  std::vector<std::int64_t> calls, served;
};

struct Pair {
  std::vector<Interval> calls, served;
  std::map<std::string, std::int64_t> by_function;
};

/// Handlers that take turns end at equal distances; those of independent callers come closer.
std::optional<SerializedHandlers> find_serialized(int rank, const std::string& name,
                                                  const std::vector<Interval>& handlers) {
  constexpr std::size_t kLeastHandlers = 20;
  constexpr double kLeastAtATime = 1.5, kLeastDistance = 0.8;
  if (handlers.size() < kLeastHandlers) return std::nullopt;
  std::vector<std::int64_t> ends, distances;
  std::int64_t sum = 0;
  for (const Interval& handler : handlers) {
    ends.push_back(handler.end);
    sum += handler.length();
  }
  std::sort(ends.begin(), ends.end());
  for (std::size_t i = 1; i < ends.size(); ++i) distances.push_back(ends[i] - ends[i - 1]);
  SerializedHandlers found{.rank = rank, .name = name};
  found.busy = union_length(handlers);
  if (found.busy == 0) return std::nullopt;
  found.at_a_time = static_cast<double>(sum) / static_cast<double>(found.busy);
  found.interval = found.busy / std::ssize(handlers);
  found.closest = percentile(distances, 0.1);
  const bool take_turns =
      static_cast<double>(found.closest) >= kLeastDistance * static_cast<double>(found.interval);
  return found.at_a_time >= kLeastAtATime && take_turns ? std::optional(found) : std::nullopt;
}

}  // namespace

std::int64_t percentile(std::vector<std::int64_t>& values, double share) {
  if (values.empty()) return 0;
  const auto rank = static_cast<std::ptrdiff_t>(std::ceil(share * static_cast<double>(values.size()))) - 1;
  const auto at = values.begin() + std::clamp<std::ptrdiff_t>(rank, 0, std::ssize(values) - 1);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

Calls examine_calls(const TraceSet& set) {
  std::map<std::string, Durations> functions;
  std::map<std::pair<int, int>, Pair> pairs;
  std::map<std::pair<int, std::string>, std::vector<Interval>> handlers;  // by rank and function
  Calls result;
  for (const WorkerTrace& worker : set.workers) {
    for (const StoredSpan& span : worker.contents.spans) {
      const int peer = span.link.peer;
      if (peer < 0 || (span.kind != SpanKind::kCall && span.kind != SpanKind::kHandler)) continue;
      const std::string& name = worker.name_of(span);
      const std::int64_t length = span.end - span.begin;
      // A call's span has the bytes of the reply, a handler's those of the request: both came from the peer.
      TrafficFigures& traffic = result.traffic[{peer, worker.rank()}];
      traffic.bytes += span.link.bytes;
      ++traffic.messages;
      if (span.kind == SpanKind::kCall) {
        functions[name].calls.push_back(length);
        Pair& pair = pairs[{worker.rank(), peer}];
        pair.calls.push_back({span.begin, span.end});
        pair.by_function[name] += length;
      } else {
        functions[name].served.push_back(length);
        handlers[{worker.rank(), name}].push_back({span.begin, span.end});
        pairs[{peer, worker.rank()}].served.push_back({span.begin, span.end});
      }
    }
  }
  for (auto& [name, durations] : functions) {
    FunctionFigures figures{.name = name, .calls = durations.calls.size(), .served = durations.served.size()};
    for (const std::int64_t length : durations.calls) figures.total += length;
    figures.p50 = percentile(durations.calls, 0.5);
    figures.p99 = percentile(durations.calls, 0.99);
    figures.longest = percentile(durations.calls, 1);
    figures.served_p50 = percentile(durations.served, 0.5);
    figures.served_p99 = percentile(durations.served, 0.99);
    result.functions.push_back(std::move(figures));
  }
  for (auto& [ranks, pair] : pairs) {
    if (pair.calls.empty()) continue;
    const auto longest = std::max_element(pair.by_function.begin(), pair.by_function.end(),
                                          [](const auto& a, const auto& b) { return a.second < b.second; });
    result.callers.push_back({ranks.first, ranks.second, union_length(std::move(pair.calls)),
                              union_length(std::move(pair.served)), longest->first});
  }
  for (const auto& [where, intervals] : handlers) {
    if (auto found = find_serialized(where.first, where.second, intervals)) {
      result.serialized.push_back(std::move(*found));
    }
  }
  std::stable_sort(result.serialized.begin(), result.serialized.end(),
                   [](const auto& a, const auto& b) { return a.busy > b.busy; });
  std::stable_sort(result.functions.begin(), result.functions.end(),
                   [](const auto& a, const auto& b) { return a.total > b.total; });
  std::stable_sort(result.callers.begin(), result.callers.end(),
                   [](const auto& a, const auto& b) { return a.waiting > b.waiting; });
  return result;
}

}  // namespace torchspan::launch
