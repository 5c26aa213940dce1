#include "collective/shm/operation.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <span>

#include <torchspan/collective.h>

#include "collective/tensors.h"

namespace torchspan::collective::shm {
namespace {

std::string_view name_of(Verb verb) {
  switch (verb) {
    case Verb::kAllReduce:
      return "all_reduce";
    case Verb::kReduceScatter:
      return "reduce_scatter";
    case Verb::kAllGather:
      return "all_gather";
    case Verb::kBroadcast:
      return "broadcast";
    case Verb::kAllToAll:
      return "all_to_all";
    case Verb::kExchange:
      return "all_gather_bytes";
    case Verb::kBarrier:
      return "barrier";
    case Verb::kGather:
      return "gather";
    case Verb::kScatter:
      return "scatter";
    case Verb::kReduce:
      return "reduce";
  }
  return "an unknown operation";
}

/// Verbs whose calls agree whatever the shapes.
bool has_own_shapes(Verb verb) {
  return verb == Verb::kAllToAll || verb == Verb::kExchange || verb == Verb::kBarrier ||
         verb == Verb::kGather || verb == Verb::kScatter;
}

std::span<const std::int64_t> sizes_of(const Call& call) {
  return {call.sizes.data(), std::min<std::size_t>(call.dimensions, kMostDimensions)};
}

std::string describe_call(const Call& call) {
  const bool gathers_list = call.verb == Verb::kAllGather && call.tensors != 0;
  const std::string_view verb = gathers_list ? "all_gather_into_tensor" : name_of(call.verb);
  if (call.verb == Verb::kBarrier || call.verb == Verb::kExchange) return fmt::format("{}()", verb);
  std::string text = fmt::format("{}{}({}{}", verb, call.tensors != 0 ? "_coalesced" : "",
                                 call.sparse != 0 ? "sparse " : "", name_of_dtype(call.dtype));
  if (call.verb == Verb::kAllToAll) return text + " parts)";
  if (call.verb == Verb::kGather) return text + fmt::format(", to rank {})", call.root);
  if (call.verb == Verb::kScatter) return text + fmt::format(", from rank {})", call.root);
  text += fmt::format(" [{}]", fmt::join(sizes_of(call), ", "));
  if (call.tensors != 0) text += fmt::format(" of {} tensors with shapes #{:08x}", call.tensors, call.shapes);
  if (call.verb == Verb::kBroadcast) return text + fmt::format(" from rank {})", call.root);
  if (call.verb == Verb::kAllGather) return text + ")";
  text += fmt::format(", {}", to_string(static_cast<ReduceOp>(call.reduction)));
  text += call.verb == Verb::kReduce ? fmt::format(", to rank {})", call.root) : ")";
  if (call.entries != 0) text += fmt::format(" with {} sparse dimensions", call.sparse_dimensions);
  return text;
}

}  // namespace

std::string describe(const Call& call) { return describe_call(call) + torchspan::describe(call.part); }

std::string describe_numbered(const Call& call) {
  return fmt::format("{}, call {} of the group", describe(call), call.sequence + 1);
}

bool agree(const Call& a, const Call& b) {
  if (a.sequence != b.sequence || a.verb != b.verb || a.dtype != b.dtype || a.root != b.root ||
      a.reduction != b.reduction || a.sparse != b.sparse || a.tensors != b.tensors || a.shapes != b.shapes ||
      a.part != b.part) {
    return false;
  }
  if (has_own_shapes(a.verb)) return true;
  const auto sizes_a = sizes_of(a), sizes_b = sizes_of(b);
  const std::size_t free = a.verb == Verb::kAllGather && !sizes_a.empty() ? 1 : 0;
  const bool both_have_entries = a.entries != 0 && b.entries != 0;
  if (both_have_entries && a.sparse_dimensions != b.sparse_dimensions) return false;
  return a.dimensions == b.dimensions &&
         std::equal(sizes_a.begin() + static_cast<std::ptrdiff_t>(free), sizes_a.end(),
                    sizes_b.begin() + static_cast<std::ptrdiff_t>(free), sizes_b.end());
}

}  // namespace torchspan::collective::shm
