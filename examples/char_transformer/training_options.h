#pragma once
#include <cstdint>
#include <string>

#include "char_transformer/model.h"

namespace CLI {
class App;
}

namespace char_transformer {

/// Options that all programs share.
struct TrainingOptions {
  std::string text = "build/data/fortunes.txt";
  ModelOptions model;
  std::int64_t steps = 400;
  std::int64_t batch = 32;
  double lr = 0.003;

  /// Characters per step.
  std::int64_t characters() const { return batch * model.context; }
};

/// Options of the programs that train a pipeline and then write a text.
struct PipelineTrainingOptions : TrainingOptions {
  int micro_batches = 4;
  std::string checkpoint;  ///< folder; empty: none
  std::int64_t checkpoint_every = 100;
  std::string prompt = "Call me ";
  std::int64_t sample = 300;

  /// Whether the state after that many steps is saved.
  bool saves_after(std::int64_t done) const {
    return !checkpoint.empty() && (done == steps || done % checkpoint_every == 0);
  }
};

/// --text, --steps, --batch and --lr, and the model's --context, --width, --blocks, --heads and --seed.
void add_training_options(CLI::App& app, TrainingOptions& options);
/// The same, and --dropout, --micro-batches, --checkpoint, --checkpoint-every, --prompt and --sample.
void add_pipeline_options(CLI::App& app, PipelineTrainingOptions& options);

/// Throws torchspan::Error{kInvalid} unless the heads have equal parts of the width.
void check(const ModelOptions& options);
/// Throws torchspan::Error{kInvalid} for the size of an open world, 0.
void check_world_size(int world_size);

}  // namespace char_transformer
