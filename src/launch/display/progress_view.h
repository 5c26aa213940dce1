#pragma once
#include <utility>
#include <vector>

#include "launch/display/board.h"
#include "launch/display/display.h"

namespace torchspan::launch {

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
