#pragma once
#include <cstdint>
#include <string>

#include <torchspan/core/observation.h>
#include <torchspan/session.h>

#include "fashion_mnist/dataset.h"
#include "fashion_mnist/model.h"

namespace CLI {
class App;
}

namespace fashion_mnist {

/// Options that all training programs share.
struct TrainingOptions {
  std::string data = kDefaultFolder;
  std::int64_t epochs = 5;
  std::int64_t batch = 128;
  std::uint64_t seed = 1;
  std::int64_t limit = 0;  ///< images of each split; 0: all
  std::string device = "cpu";
  std::string checkpoint;               ///< folder; empty: none
  std::int64_t checkpoint_every = 100;  ///< steps

  /// Whether the state after `step` steps is saved.
  bool saves_after(std::int64_t step, bool is_last) const {
    return !checkpoint.empty() && (is_last || step % checkpoint_every == 0);
  }
};

/// --data, --epochs, --batch, --seed and --limit.
void add_training_options(CLI::App& app, TrainingOptions& options);
/// --checkpoint and --checkpoint-every.
void add_checkpoint_options(CLI::App& app, TrainingOptions& options);

/// Loads the split's images, at most TrainingOptions::limit of them. Throws what load() throws.
Dataset load(const TrainingOptions& options, Split split);

/// The share of images that `network`, then in evaluation mode, classifies right.
double accuracy(const Dataset& data, ConvNet network);

/// Shows the progress line and counts images per second, from its construction to finish().
class Meter {
 public:
  /// `images` is the size of the data set; `text` is shown at the end of the line. `session` must outlive it.
  Meter(torchspan::Session& session, const TrainingOptions& options, std::int64_t images,
        std::string text = {});
  /// For training that resumes after that many steps.
  void continue_after(std::int64_t steps);
  /// Reports one step of an epoch (counted from 1), with its loss, which it also logs, and its number of images.
  void step(std::int64_t epoch, double loss, std::int64_t images);
  void finish();

  double seconds() const;
  std::int64_t images() const { return images_; }
  /// 0 before the first step.
  double images_per_second() const { return images_ == 0 ? 0 : static_cast<double>(images_) / seconds(); }
  /// "trained on 60000 images in 12.3 s: 4878 images/s".
  std::string summary() const;

 private:
  torchspan::Session& session_;
  torchspan::Progress progress_;
  torchspan::ProgressReport report_;
  double seconds_ = 0;  ///< until the last step
  std::int64_t images_ = 0;
};

}  // namespace fashion_mnist
