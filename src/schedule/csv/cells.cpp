#include "schedule/csv/cells.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace torchspan::schedule {
namespace {

struct Name {
  CellKind kind;
  std::string_view name;
};

constexpr std::array<Name, 16> kNames = {{{CellKind::kIdle, ""},
                                          {CellKind::kForward, "F"},
                                          {CellKind::kBackward, "B"},
                                          {CellKind::kInputGradient, "I"},
                                          {CellKind::kWeightGradient, "W"},
                                          {CellKind::kUnshard, "UNSHARD"},
                                          {CellKind::kReshard, "RESHARD"},
                                          {CellKind::kReduceGradient, "REDUCE_GRAD"},
                                          {CellKind::kWaitReduceGradient, "WAIT_REDUCE_GRAD"},
                                          {CellKind::kSendForward, "SEND_F"},
                                          {CellKind::kReceiveForward, "RECV_F"},
                                          {CellKind::kSendBackward, "SEND_B"},
                                          {CellKind::kReceiveBackward, "RECV_B"},
                                          {CellKind::kWaitSendForward, "WAIT_SEND_F"},
                                          {CellKind::kWaitSendBackward, "WAIT_SEND_B"},
                                          {CellKind::kOverlap, "OVERLAP_F_B"}}};

constexpr std::array<std::pair<CellKind, ActionKind>, 4> kComputations = {
    {{CellKind::kForward, ActionKind::kForward},
     {CellKind::kBackward, ActionKind::kBackward},
     {CellKind::kInputGradient, ActionKind::kInputGradient},
     {CellKind::kWeightGradient, ActionKind::kWeightGradient}}};

}  // namespace

std::string_view cell_name(CellKind kind) {
  for (const Name& known : kNames) {
    if (known.kind == kind) return known.name;
  }
  return "?";
}

std::optional<CellKind> cell_kind(std::string_view name) {
  for (const Name& known : kNames) {
    if (known.name == name && !name.empty() && known.kind != CellKind::kOverlap) return known.kind;
  }
  return std::nullopt;
}

std::string cell_names() {
  std::string names;
  for (const Name& known : kNames) {
    if (!known.name.empty()) names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  return names;
}

bool has_micro_batch(CellKind kind) {
  switch (kind) {
    case CellKind::kIdle:
    case CellKind::kUnshard:
    case CellKind::kReshard:
    case CellKind::kReduceGradient:
    case CellKind::kWaitReduceGradient:
    case CellKind::kOverlap:
      return false;
    default:
      return true;
  }
}

std::optional<ActionKind> computation(CellKind kind) {
  for (const auto& [cell, action] : kComputations) {
    if (cell == kind) return action;
  }
  return std::nullopt;
}

CellKind cell_of(ActionKind kind) {
  for (const auto& [cell, action] : kComputations) {
    if (action == kind) return cell;
  }
  return CellKind::kIdle;
}

std::string printable(std::string_view text) {
  constexpr std::size_t kMost = 40;
  std::string result;
  std::transform(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(std::min(text.size(), kMost)),
                 std::back_inserter(result), [](char c) { return c >= ' ' && c <= '~' ? c : '?'; });
  return text.size() > kMost ? result + "..." : result;
}

}  // namespace torchspan::schedule
