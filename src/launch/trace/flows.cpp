#include "launch/trace/flows.h"

#include <map>
#include <string>
#include <tuple>

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
  return flows;
}

}  // namespace torchspan::launch
