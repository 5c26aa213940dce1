#include "char_transformer/training_progress.h"

#include <fmt/format.h>

namespace char_transformer {

TrainingProgress::TrainingProgress(torchspan::Session& session, const TrainingOptions& options,
                                   std::int64_t first)
    : options_(options), first_(first), shown_(session.rank() == 0), progress_(session) {}

void TrainingProgress::step(std::int64_t done, double loss) {
  if (!shown_) return;
  torchspan::ProgressReport line;
  line.step = done;
  line.steps = options_.steps;
  line.loss = loss;
  line.unit = "characters";
  line.rate = static_cast<double>((done - first_) * options_.characters()) /
              torchspan::to_seconds(progress_.elapsed());
  progress_.report(line);
}

void TrainingProgress::finish() {
  progress_.finish();
  seconds_ = torchspan::to_seconds(progress_.elapsed());
}

std::string TrainingProgress::summary() const {
  const std::int64_t steps = options_.steps - first_;
  return fmt::format("{} steps of {} x {} characters in {:.1f} s: {:.0f} characters/s", steps, options_.batch,
                     options_.model.context, seconds_,
                     static_cast<double>(steps * options_.characters()) / seconds_);
}

}  // namespace char_transformer
