#include "launch/display/board.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <utility>

#include "launch/display/lines.h"

namespace torchspan::launch {
namespace {

constexpr std::array<std::pair<WorkerState, const char*>, 5> kStateNames = {{
    {WorkerState::kRunning, "running"},
    {WorkerState::kStopping, "stopping"},
    {WorkerState::kFailed, "failed"},
    {WorkerState::kStopped, "stopped"},
    {WorkerState::kDone, "done"},
}};

constexpr const char* kRed = "31";
constexpr const char* kYellow = "1;33";
constexpr const char* kDim = "2";

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
      if (states_[rank] == state) ranks.push_back(first_rank_ + static_cast<int>(rank));
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
    text = fmt::format("  rank {} at step {}", first_rank_ + rank, report.step);
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

void Board::set_activities(std::vector<Activity> activities) {
  activities_ = std::move(activities);
  shares_.add(activities_);
}

Board::RankLine Board::line_of(const Activity& activity) const {
  const auto index = static_cast<std::size_t>(std::max(activity.rank - first_rank_, 0));
  const WorkerState state = index < states_.size() ? states_[index] : WorkerState::kRunning;
  const auto text = [&](char mark, const std::string& what) {
    return without_controls(fmt::format("{} rank {:<3} {}", mark, activity.rank, what));
  };
  if (state == WorkerState::kFailed) return {3, text(' ', "has failed"), kRed};
  if (state == WorkerState::kStopped) return {0, text(' ', "was stopped"), kDim};
  if (state == WorkerState::kDone) return {0, text(' ', "is done"), kDim};
  if (activity.kind == Activity::Kind::kStopped || activity.kind == Activity::Kind::kSilent) {
    return {3, text('!', activity.text), kRed};
  }
  std::string what = activity.text;
  const auto report = reports_.find(static_cast<int>(index));
  if (report != reports_.end() && report->second.step != reports_.begin()->second.step) {
    what += fmt::format("; at step {}", report->second.step);
  }
  if (const auto share = shares_.straggler_share(activity.rank)) {
    return {2, text('*', what + fmt::format("; others wait for it {:.0f} % of the time", 100 * *share)),
            kYellow};
  }
  return {0, text(' ', what), activity.kind == Activity::Kind::kWaiting ? kDim : ""};
}

/// "  … 9 more wait, 3 more compute".
std::string Board::rest_of(const std::vector<bool>& shown) const {
  int waiting = 0, others = 0;
  for (std::size_t i = 0; i < activities_.size(); ++i) {
    if (!shown[i]) ++(activities_[i].kind == Activity::Kind::kWaiting ? waiting : others);
  }
  std::string text;
  if (waiting > 0) text = fmt::format("{} more wait", waiting);
  if (others > 0) text += fmt::format("{}{} more compute", text.empty() ? "" : ", ", others);
  return "  … " + text;
}

std::vector<std::string> Board::block(std::size_t width, std::size_t most, bool colours) const {
  if (activities_.empty()) return {line(width)};
  std::vector<std::string> lines = {reports_.empty() ? states()
                                                     : format_progress(reports_.begin()->second, width)};
  std::vector<RankLine> ranks;
  for (const Activity& activity : activities_) ranks.push_back(line_of(activity));
  std::vector<std::size_t> order(ranks.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return ranks[a].severity > ranks[b].severity; });
  const std::size_t room = std::max<std::size_t>(most, 3) - 1;
  const bool all = ranks.size() <= room;
  std::vector<bool> shown(ranks.size(), all);
  for (std::size_t i = 0; !all && i + 1 < room; ++i) shown[order[i]] = true;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (!shown[i]) continue;
    const bool plain = !colours || *ranks[i].colour == '\0';
    lines.push_back(plain ? ranks[i].text : fmt::format("\x1b[{}m{}\x1b[0m", ranks[i].colour, ranks[i].text));
  }
  if (!all) lines.push_back(rest_of(shown));
  return lines;
}

void ProgressView::set_report(int rank, ProgressReport report) {
  board_.set_report(rank, std::move(report));
  changed_ = true;
}

void ProgressView::set_state(int rank, WorkerState state) {
  board_.set_state(rank, state);
  changed_ = true;
}

void ProgressView::set_activities(std::vector<Activity> activities) {
  board_.set_activities(std::move(activities));
  changed_ = true;
}

Duration ProgressView::pause() const {
  return display_.is_live() ? std::chrono::milliseconds(100) : std::chrono::seconds(10);
}

void ProgressView::show(TimePoint now) {
  if (!changed_ || !has_content() || now - shown_at_ < pause()) return;
  changed_ = false;
  shown_at_ = now;
  if (display_.is_live()) {
    // A third of the terminal, so that the workers' output remains visible.
    const std::size_t most = std::clamp<std::size_t>(display_.height() / 3, 3, 18);
    display_.set_live(board_.block(display_.width() - 1, most, display_.has_colours()));
  } else {
    display_.say("torchspan: " + board_.line() + "\n");
  }
}

void ProgressView::finish() {
  if (display_.is_live()) display_.set_live({});
  if (board_.has_reports() && (display_.is_live() || changed_)) {
    display_.say("torchspan: " + board_.line(display_.is_live() ? display_.width() - 12 : 1000) + "\n");
  }
}

Deadline ProgressView::next() const {
  return changed_ && has_content() ? Deadline(shown_at_ + pause()) : Deadline::never();
}

}  // namespace torchspan::launch
