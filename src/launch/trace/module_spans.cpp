#include "launch/trace/module_spans.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/api/span_kinds.h"
#include "core/api/trace_format.h"

namespace torchspan::launch {
namespace {

/// One forward of a module.
struct ModuleCall {
  std::string module;
  std::optional<std::size_t> parent;  ///< index of the call of the enclosing module
  std::uint32_t thread = 0;
  std::int32_t forward_thread = 0;  ///< LibTorch's number of it
  std::int64_t begin = 0, end = 0;
  std::uint64_t first_node = 0, last_node = 0;  ///< sequence numbers of the autograd nodes: from, to before
  std::uint32_t first_use = 0;                  ///< name of the module whose parameter was used first,
  std::int32_t first_parameter = -1;            ///< and number of the parameter
};

/// Groups the uses of parameters, in order of time for each thread, to calls of the modules that enclose them.
class ModuleCalls {
 public:
  /// `path` is the module's name, such as "encoder.layers.0".
  void add_use(const StoredSpan& use, const std::string& path);
  /// Later uses on this thread belong to new calls.
  void end_forward(std::uint32_t thread) { open_[thread].clear(); }

  /// In the order in which they began on their thread; a module precedes those inside it.
  const std::vector<ModuleCall>& calls() const { return calls_; }
  /// Returns the innermost call that created an autograd node; nullopt if no call did.
  std::optional<std::size_t> find(std::int32_t forward_thread, std::uint64_t node) const;

 private:
  std::vector<ModuleCall> calls_;
  std::map<std::uint32_t, std::vector<std::size_t>> open_;  ///< by thread: calls, outermost first
  std::map<std::int32_t, std::vector<std::size_t>>
      by_forward_;  ///< by LibTorch's thread: calls by first node
};

/// Whether `inner` is `outer` or is inside it.
bool encloses(std::string_view outer, std::string_view inner) {
  return inner.starts_with(outer) && (inner.size() == outer.size() || inner[outer.size()] == '.');
}

void ModuleCalls::add_use(const StoredSpan& use, const std::string& path) {
  std::vector<std::size_t>& open = open_[use.thread];
  const auto goes_on = [&](std::size_t call) {
    const ModuleCall& module = calls_[call];
    const bool again = module.first_use == use.name && module.first_parameter == use.link.peer;
    return module.forward_thread == use.link.part && encloses(module.module, path) && !again;
  };
  open.erase(std::find_if_not(open.begin(), open.end(), goes_on), open.end());
  const std::uint64_t last_node = use.link.id + use.link.bytes;
  for (std::size_t end = open.empty() ? 0 : calls_[open.back()].module.size() + 1; end <= path.size();) {
    end = std::min(path.find('.', end), path.size());
    const auto parent = open.empty() ? std::nullopt : std::optional(open.back());
    by_forward_[use.link.part].push_back(calls_.size());
    open.push_back(calls_.size());
    calls_.push_back({path.substr(0, end), parent, use.thread, use.link.part, use.begin, use.end, use.link.id,
                      last_node, use.name, use.link.peer});
    ++end;
  }
  for (const std::size_t call : open) {
    calls_[call].end = std::max(calls_[call].end, use.end);
    calls_[call].last_node = std::max(calls_[call].last_node, last_node);
  }
}

std::optional<std::size_t> ModuleCalls::find(std::int32_t forward_thread, std::uint64_t node) const {
  const auto found = by_forward_.find(forward_thread);
  if (found == by_forward_.end()) return std::nullopt;
  const auto after = std::upper_bound(
      found->second.begin(), found->second.end(), node,
      [&](std::uint64_t number, std::size_t call) { return number < calls_[call].first_node; });
  if (after == found->second.begin()) return std::nullopt;
  // A call that contains the node was open when the last call before the node began: it encloses that call.
  std::optional<std::size_t> call = *std::prev(after);
  while (call && calls_[*call].last_node <= node) call = calls_[*call].parent;
  return call;
}

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
