#pragma once
#include <cstdint>

#include <torchspan/core/observation.h>
#include <torchspan/session.h>

#include "char_transformer/training_options.h"

namespace char_transformer {

/// Measures a training, and shows its progress on rank 0.
class TrainingProgress {
 public:
  /// Earlier processes have made the first `first` steps.
  TrainingProgress(torchspan::Session& session, const TrainingOptions& options, std::int64_t first);
  /// Shows that `done` steps are made, the last one with that loss.
  void step(std::int64_t done, double loss);
  /// Ends the line and the measurement.
  void finish();
  /// "400 steps of 32 x 64 characters in 8.2 s: 99902 characters/s".
  std::string summary() const;

 private:
  const TrainingOptions& options_;
  const std::int64_t first_;
  const bool shown_;
  torchspan::Progress progress_;
  double seconds_ = 0;
};

}  // namespace char_transformer
