#include "launch/trace/module_spans.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/api/operator_spans.h"
#include "launch/trace/module_calls.h"

namespace torchspan::launch {
namespace {

/// Numbers names that the worker did not write.
class AddedNames {
 public:
  explicit AddedNames(std::vector<std::string>& names) : names_(names) {}

  std::uint32_t number_of(const std::string& name) {
    const auto [place, added] = known_.try_emplace(name, static_cast<std::uint32_t>(names_.size()));
    if (added) names_.push_back(name);
    return place->second;
  }

 private:
  std::vector<std::string>& names_;
  std::map<std::string, std::uint32_t> known_;
};

/// The backwards of module calls on one thread, from the autograd nodes that it runs.
class BackwardSpans {
 public:
  struct Backward {
    std::size_t call;
    std::int64_t begin, end;
  };

  BackwardSpans(const ModuleCalls& calls, std::vector<Backward>& ended) : calls_(calls), ended_(ended) {}

  void add_node(const StoredSpan& node) {
    const auto innermost = calls_.find(node.link.part, node.link.id);
    if (!innermost) return;
    std::vector<std::size_t> chain;
    for (auto call = innermost; call; call = calls_.calls()[*call].parent) chain.push_back(*call);
    std::reverse(chain.begin(), chain.end());
    std::size_t common = 0;
    while (common < std::min(chain.size(), open_.size()) && open_[common].call == chain[common]) ++common;
    end_from(common);
    for (std::size_t i = common; i < chain.size(); ++i) open_.push_back({chain[i], node.begin, node.end});
    for (Backward& backward : open_) backward.end = std::max(backward.end, node.end);
  }
  void end() { end_from(0); }

 private:
  void end_from(std::size_t first) {
    ended_.insert(ended_.end(), open_.begin() + static_cast<std::ptrdiff_t>(first), open_.end());
    open_.resize(first);
  }

  const ModuleCalls& calls_;
  std::vector<Backward>& ended_;
  std::vector<Backward> open_;  ///< outermost first
};

bool is_node(const StoredSpan& span) { return span.kind == kOperatorSpan && span.link.part >= 0; }

using SpansOfThreads = std::map<std::uint32_t, std::vector<StoredSpan>>;

/// A node that LibTorch's engine runs lasts as long as the operator in which the engine records what it does for the
/// node, such as the sum of a gradient over a batch.
void extend_nodes(std::vector<StoredSpan>& spans, const std::vector<bool>& evaluations) {
  StoredSpan evaluation;
  for (StoredSpan& span : spans) {
    if (evaluations[span.name]) evaluation = span;
    if (!is_node(span) || span.begin < evaluation.begin || span.end > evaluation.end) continue;
    span.begin = evaluation.begin;
    span.end = evaluation.end;
  }
  std::erase_if(spans, [&](const StoredSpan& span) { return evaluations[span.name]; });
}

/// The uses of parameters and the autograd nodes of each thread, by time.
SpansOfThreads by_thread(const TraceContents& trace) {
  std::vector<bool> evaluations;
  for (const std::string& name : trace.names) {
    evaluations.push_back(name.starts_with("autograd::engine::evaluate_function: "));
  }
  SpansOfThreads threads;
  for (const StoredSpan& span : trace.spans) {
    if (span.kind == kModuleSpan || is_node(span) || evaluations[span.name])
      threads[span.thread].push_back(span);
  }
  for (auto& [thread, spans] : threads) {
    std::ranges::stable_sort(spans, {},
                             [](const StoredSpan& span) { return std::pair(span.begin, -span.end); });
    extend_nodes(spans, evaluations);
  }
  return threads;
}

}  // namespace

void make_module_spans(TraceContents& trace) {
  const auto threads = by_thread(trace);
  ModuleCalls calls;
  for (const auto& [thread, spans] : threads) {
    for (const StoredSpan& span : spans) {
      is_node(span) ? calls.end_forward(thread) : calls.add_use(span, trace.names[span.name]);
    }
  }
  std::vector<StoredSpan> added;
  AddedNames names(trace.names);
  const auto add = [&](const char* what, std::size_t call, std::uint32_t thread, std::int64_t begin,
                       std::int64_t end) {
    const std::string name = std::string(what) + calls.calls()[call].module;
    added.push_back({begin, end, {.id = call + 1}, names.number_of(name), thread, kModuleSpan, true});
  };
  for (std::size_t i = 0; i < calls.calls().size(); ++i) {
    const ModuleCall& call = calls.calls()[i];
    add("forward ", i, call.thread, call.begin, call.end);
  }
  for (const auto& [thread, spans] : threads) {
    std::vector<BackwardSpans::Backward> ended;
    BackwardSpans backwards(calls, ended);
    for (const StoredSpan& span : spans) {
      is_node(span) ? backwards.add_node(span) : backwards.end();
    }
    backwards.end();
    for (const auto& backward : ended) add("backward ", backward.call, thread, backward.begin, backward.end);
  }
  std::erase_if(trace.spans, [](const StoredSpan& span) { return span.kind == kModuleSpan; });
  for (StoredSpan& span : trace.spans) span.nested = span.nested || span.kind == kOperatorSpan;
  trace.spans.insert(trace.spans.end(), added.begin(), added.end());
}

}  // namespace torchspan::launch
