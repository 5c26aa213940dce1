#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/observation.h>

#include "launch/display/display.h"
#include "launch/watch/activity.h"

namespace torchspan::launch {

/// kStopped: ended because the launcher asked it to.
enum class WorkerState { kRunning, kDone, kFailed, kStopping, kStopped };

/// "0-2,5": ranks as ranges; `ranks` ascending.
std::string format_ranks(const std::vector<int>& ranks);

/// Formats the state of the whole job: as one line, or as a block with a line for each rank. For one thread at a time.
class Board {
 public:
  /// `first_rank` is the rank of this host's first worker in the job; reports and states are numbered from 0.
  explicit Board(int workers, int first_rank = 0)
      : first_rank_(first_rank), states_(static_cast<std::size_t>(workers), WorkerState::kRunning) {}

  void set_report(int rank, ProgressReport report) { reports_[rank] = std::move(report); }
  void set_state(int rank, WorkerState state) { states_.at(static_cast<std::size_t>(rank)) = state; }
  /// Replaces what is known of the workers; they are numbered by their ranks in the job.
  void set_activities(std::vector<Activity> activities);
  bool has_reports() const { return !reports_.empty(); }
  bool has_activities() const { return !activities_.empty(); }
  /// Returns "epoch 2/5  step 17/469  loss 0.5120  5,120 images/s  1m03s left | running 0-2", cut to `width`
  /// characters. The numbers are those of the lowest rank that reports; a rank behind it is named.
  std::string line(std::size_t width = 1000) const;
  /// Returns the numbers in a first line of at most `width` characters, then what each rank does, stragglers marked
  /// with '*'. Of more ranks than fit into `most` lines, those with problems are shown. Without activities, returns
  /// line().
  std::vector<std::string> block(std::size_t width, std::size_t most, bool colours) const;

 private:
  /// The line of one rank.
  struct RankLine {
    int severity = 0;  ///< 0: nothing special; shown first if not all fit
    std::string text;
    const char* colour = "";  ///< SGR parameters
  };

  RankLine line_of(const Activity& activity) const;
  std::string rest_of(const std::vector<bool>& shown) const;
  std::string states() const;
  std::string slowest_ranks() const;

  const int first_rank_;
  std::vector<WorkerState> states_;
  std::map<int, ProgressReport> reports_;
  std::vector<Activity> activities_;
  WaitShares shares_;
};

/// Shows a Board: as the live block of a terminal up to ten times per second, else as a line every ten seconds.
class ProgressView {
 public:
  ProgressView(Display& display, Board board, TimePoint now)
      : display_(display), board_(std::move(board)), shown_at_(now) {}

  void set_report(int rank, ProgressReport report);
  void set_state(int rank, WorkerState state);
  void set_activities(std::vector<Activity> activities);
  /// Whether activities are shown.
  bool is_live() const { return display_.is_live(); }
  /// Shows what has changed, if that is due.
  void show(TimePoint now);
  /// Removes the live block and shows the last state.
  void finish();
  /// When show() has something to do.
  Deadline next() const;

 private:
  bool has_content() const { return board_.has_reports() || board_.has_activities(); }
  Duration pause() const;

  Display& display_;
  Board board_;
  TimePoint shown_at_;
  bool changed_ = false;
};

}  // namespace torchspan::launch
