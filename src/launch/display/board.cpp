#include "launch/display/board.h"

#include <array>
#include <fmt/format.h>
#include <utility>

namespace torchspan::launch {
namespace {

constexpr std::array<std::pair<WorkerState, const char*>, 5> kStateNames = {{
    {WorkerState::kRunning, "running"},
    {WorkerState::kStopping, "stopping"},
    {WorkerState::kFailed, "failed"},
    {WorkerState::kStopped, "stopped"},
    {WorkerState::kDone, "done"},
}};

}  // namespace

std::string format_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (!text.empty()) text += ",";
    text += std::to_string(ranks[i]);
    if (end - i > 1) text += (end - i == 2 ? "," : "-") + std::to_string(ranks[end - 1]);
    i = end;
  }
  return text;
}

std::string Board::states() const {
  std::string text;
  for (const auto& [state, name] : kStateNames) {
    std::vector<int> ranks;
    for (std::size_t rank = 0; rank < states_.size(); ++rank) {
      if (states_[rank] == state) ranks.push_back(static_cast<int>(rank));
    }
    if (!ranks.empty()) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, format_ranks(ranks));
  }
  return text;
}

std::string Board::slowest_ranks() const {
  const ProgressReport& leader = reports_.begin()->second;
  std::pair<std::int64_t, std::int64_t> least(leader.epoch, leader.step);
  std::string text;
  for (const auto& [rank, report] : reports_) {
    const std::pair<std::int64_t, std::int64_t> at(report.epoch, report.step);
    if (at >= least) continue;
    least = at;
    text = fmt::format("  rank {} at step {}", rank, report.step);
  }
  return text;
}

std::string Board::line(std::size_t width) const {
  ProgressReport main = reports_.empty() ? ProgressReport{} : reports_.begin()->second;
  std::string tail = (reports_.empty() ? "" : slowest_ranks() + " | ") + states();
  const std::size_t head_width = width > tail.size() ? width - tail.size() : 0;
  std::string line = format_progress(main, head_width) + tail;
  return line.size() > width && head_width == 0 ? line.substr(0, width) : line;
}

}  // namespace torchspan::launch
