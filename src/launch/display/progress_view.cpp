#include "launch/display/progress_view.h"

#include <algorithm>
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
