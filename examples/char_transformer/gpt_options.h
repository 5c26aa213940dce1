#pragma once
#include <cstdint>

#include "char_transformer/training_options.h"

namespace char_transformer {

/// Options of the program gpt_pipeline.
struct GptOptions : PipelineTrainingOptions {
  GptOptions() { model.tied = model.copies = true; }

  int replicas = 1;
  std::int64_t texts = 1;
  bool cache = true;
};

void add_options(CLI::App& app, GptOptions& options);
/// Throws torchspan::Error{kInvalid}, with a remedy, for options that do not fit this number of workers.
void check(const GptOptions& options, int world_size);

}  // namespace char_transformer
