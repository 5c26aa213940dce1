#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include <torchspan/data.h>
#include <torchspan/session.h>

#include "fashion_mnist/team.h"
#include "fashion_mnist/training.h"

namespace fashion_mnist {

/// The result of a training; only rank 0 knows the speed.
struct TeamResult {
  std::int64_t first_epoch = 1;  ///< in which this process trains
  std::vector<double> losses;    ///< of this epoch and the next ones: the mean over all images
  double accuracy = 0;
  double images_per_second = 0;
  bool preempted = false;  ///< the state is saved, and training ends early
};

/// Collects the result of a team's training. Rank 0 shows the progress and the result.
class TeamReport {
 public:
  /// References must outlive it. `images` is the size of the data set.
  TeamReport(torchspan::Session& session, const Team& team, const TrainingOptions& options,
             std::int64_t images);
  /// Waits for the whole team, and begins to measure. Earlier processes have trained up to that position.
  void begin(const torchspan::DataPosition& position);
  /// Notes the mean loss of an epoch; `loss` is the sum over this rank's images. Collective. Throws
  /// torchspan::Error{kInvalid} on all ranks if the mean is not finite.
  void end_epoch(double loss);
  /// Notes a step, with its epoch, the mean loss over this rank's images, and the number of all images.
  void step(std::int64_t epoch, double loss, std::int64_t images);
  /// Ends the measurement.
  void finish();
  /// Shows and returns the result of a complete training, with its accuracy on so many test images.
  TeamResult tested(double accuracy, std::int64_t images);
  /// Returns the result of a training that ends early, after that many of all steps.
  TeamResult preempted(std::int64_t step, std::int64_t steps);

 private:
  torchspan::Session& session_;
  const Team& team_;
  const TrainingOptions& options_;
  const std::int64_t images_;
  std::optional<Meter> meter_;  ///< on rank 0
  TeamResult result_;
};

}  // namespace fashion_mnist
