#include "launch/trace/flows.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include "launch/report/pipeline_steps.h"

namespace torchspan::launch {
namespace {

/// Caller, callee and call id; or sender, receiver, pass id and what was sent.
using FlowKey = std::tuple<int, int, std::uint64_t, std::string>;

struct FlowEnds {
  std::vector<SpanPlace> from, to;
};

constexpr std::string_view kSends = "send gradients: ";
constexpr std::string_view kReceives = "receive gradients: ";

/// The rest of `name` after `prefix`.
bool split(const std::string& name, std::string_view prefix, std::string& rest) {
  if (!name.starts_with(prefix)) return false;
  rest = name.substr(prefix.size());
  return true;
}

const StoredSpan& span_at(const TraceSet& set, const SpanPlace& place) {
  return set.workers[place.worker].contents.spans[place.span];
}

/// Actions of a pipeline's step by micro-batch, stage and direction; of those of replicas nothing says which follow each
/// other.
void add_pipeline_flows(const TraceSet& set, std::vector<Flow>& flows) {
  using Key = std::tuple<std::uint64_t, int, int, bool>;  // step, micro-batch, stage, whether it is a forward
  std::map<Key, std::vector<SpanPlace>> actions;
  for (std::size_t w = 0; w < set.workers.size(); ++w) {
    const std::vector<StoredSpan>& spans = set.workers[w].contents.spans;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      if (spans[i].kind != SpanKind::kPipeline) continue;
      const auto action = parse_action(set.workers[w].name_of(spans[i]));
      if (!action || action->kind == schedule::ActionKind::kWeightGradient) continue;
      actions[{spans[i].link.id, action->micro_batch, action->stage,
               action->kind == schedule::ActionKind::kForward}]
          .push_back({w, i});
    }
  }
  for (const auto& [key, places] : actions) {
    const auto& [step, micro_batch, stage, forward] = key;
    const auto next = actions.find({step, micro_batch, stage + (forward ? 1 : -1), forward});
    if (places.size() != 1 || next == actions.end() || next->second.size() != 1) continue;
    if (places[0].worker == next->second[0].worker) continue;
    flows.push_back({.from = places[0], .to = next->second[0], .from_end = true});
  }
}

/// Buckets and other operations of a group: the others end when the rank that starts last has its data.
void add_group_flows(const TraceSet& set, std::vector<Flow>& flows) {
  using Key = std::tuple<SpanKind, int, std::uint64_t, std::string>;  // kind, bucket or group, number, name
  std::map<Key, std::vector<SpanPlace>> operations;
  for (std::size_t w = 0; w < set.workers.size(); ++w) {
    const std::vector<StoredSpan>& spans = set.workers[w].contents.spans;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const bool of_group = spans[i].kind == SpanKind::kBucket || spans[i].kind == SpanKind::kCollective;
      if (!of_group || spans[i].link.part < 0) continue;
      operations[{spans[i].kind, spans[i].link.part, spans[i].link.id, set.workers[w].name_of(spans[i])}]
          .push_back({w, i});
    }
  }
  for (const auto& [key, places] : operations) {
    const auto same_worker = [](const SpanPlace& a, const SpanPlace& b) { return a.worker == b.worker; };
    if (std::ranges::adjacent_find(places, same_worker) != places.end()) continue;  // in the order of workers
    const SpanPlace last = *std::ranges::max_element(
        places, {}, [&](const SpanPlace& place) { return span_at(set, place).begin; });
    for (const SpanPlace& place : places) {
      const bool waited = place.worker != last.worker && span_at(set, place).end > span_at(set, last).begin;
      if (waited) flows.push_back({.from = last, .to = place, .to_end = true});
    }
  }
}

}  // namespace

std::vector<Flow> find_flows(const TraceSet& set) {
  std::map<FlowKey, FlowEnds> calls, gradients;
  for (std::size_t w = 0; w < set.workers.size(); ++w) {
    const WorkerTrace& worker = set.workers[w];
    const std::vector<StoredSpan>& spans = worker.contents.spans;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const StoredSpan& span = spans[i];
      const int peer = span.link.peer;
      if (peer < 0) continue;
      std::string what;
      if (span.kind == SpanKind::kCall) {
        calls[{worker.rank(), peer, span.link.id, ""}].from.push_back({w, i});
      } else if (span.kind == SpanKind::kHandler) {
        calls[{peer, worker.rank(), span.link.id, ""}].to.push_back({w, i});
      } else if (span.kind == SpanKind::kAutograd && split(worker.name_of(span), kSends, what)) {
        gradients[{worker.rank(), peer, span.link.id, what}].from.push_back({w, i});
      } else if (span.kind == SpanKind::kAutograd && split(worker.name_of(span), kReceives, what)) {
        gradients[{peer, worker.rank(), span.link.id, what}].to.push_back({w, i});
      }
    }
  }
  std::vector<Flow> flows;
  for (const auto& [key, ends] : calls) {
    if (ends.from.size() == 1 && ends.to.size() == 1) flows.push_back({ends.from[0], ends.to[0], true});
  }
  for (const auto& [key, ends] : gradients) {
    if (ends.from.size() != ends.to.size()) continue;
    for (std::size_t i = 0; i < ends.from.size(); ++i) flows.push_back({ends.from[i], ends.to[i], false});
  }
  add_pipeline_flows(set, flows);
  add_group_flows(set, flows);
  return flows;
}

}  // namespace torchspan::launch
