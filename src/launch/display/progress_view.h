#pragma once
#include "launch/display/board.h"
#include "launch/display/display.h"

namespace torchspan::launch {

/// Shows a Board: as the live line of a terminal ten times per second, else as a line every ten seconds.
class ProgressView {
 public:
  ProgressView(Display& display, int workers, TimePoint now)
      : display_(display), board_(workers), shown_at_(now) {}

  void set_report(int rank, ProgressReport report);
  void set_state(int rank, WorkerState state);
  /// Shows what has changed, if that is due.
  void show(TimePoint now);
  /// Ends the live line and shows the last state.
  void finish();
  /// When show() has something to do.
  Deadline next() const;

 private:
  Duration pause() const;

  Display& display_;
  Board board_;
  TimePoint shown_at_;
  bool changed_ = false;
};

}  // namespace torchspan::launch
