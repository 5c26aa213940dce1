#include "launch/display/progress_view.h"

#include <utility>

namespace torchspan::launch {

void ProgressView::set_report(int rank, ProgressReport report) {
  board_.set_report(rank, std::move(report));
  changed_ = true;
}

void ProgressView::set_state(int rank, WorkerState state) {
  board_.set_state(rank, state);
  changed_ = true;
}

Duration ProgressView::pause() const {
  return display_.is_live() ? std::chrono::milliseconds(100) : std::chrono::seconds(10);
}

void ProgressView::show(TimePoint now) {
  if (!changed_ || !board_.has_reports() || now - shown_at_ < pause()) return;
  changed_ = false;
  shown_at_ = now;
  if (display_.is_live()) {
    display_.set_live(board_.line(display_.width() - 1));
  } else {
    display_.say("torchspan: " + board_.line() + "\n");
  }
}

void ProgressView::finish() {
  if (display_.is_live()) display_.set_live("");
  if (board_.has_reports() && (display_.is_live() || changed_)) {
    display_.say("torchspan: " + board_.line(display_.is_live() ? display_.width() - 12 : 1000) + "\n");
  }
}

Deadline ProgressView::next() const {
  return changed_ && board_.has_reports() ? Deadline(shown_at_ + pause()) : Deadline::never();
}

}  // namespace torchspan::launch
