#pragma once
#include <cstdint>

#include <torchspan/core/observation.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/wire.h>

#include "recommender/ratings.h"

namespace recommender {

/// What a trainer has processed.
struct Report {
  static constexpr torchspan::FixedString kWireName = "Report";
  std::int64_t ratings = 0;
  double seconds = 0;
};

/// Measures a trainer; the first trainer shows the progress.
class Display {
 public:
  /// `line` has the totals; `shown` says whether this trainer shows it.
  Display(torchspan::Worker& worker, torchspan::ProgressReport line, bool shown);
  void step(std::int64_t epoch, double loss, std::int64_t ratings);
  Report finish();

 private:
  torchspan::Progress progress_;
  torchspan::ProgressReport line_;
  Report report_;
  const bool shown_;
};

/// Prints the model's error on the held-out ratings, below those of two simpler models.
void print_errors(const Split& data, double error);

}  // namespace recommender
