#include "launch/trace/module_calls.h"

#include <algorithm>
#include <string_view>

namespace torchspan::launch {
namespace {

/// Whether `inner` is `outer` or is inside it.
bool encloses(std::string_view outer, std::string_view inner) {
  return inner.starts_with(outer) && (inner.size() == outer.size() || inner[outer.size()] == '.');
}

}  // namespace

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

}  // namespace torchspan::launch
