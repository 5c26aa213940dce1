#pragma once
#include <cstdint>
#include <string>

#include "char_transformer/model.h"

namespace CLI {
class App;
}

namespace char_transformer {

/// Options of the program gpt_pipeline.
struct GptOptions {
  std::string text = "build/data/fortunes.txt";
  std::string checkpoint;
  std::string prompt = "Call me ";
  ModelOptions model{.tied = true, .copies = true};
  int replicas = 1;
  int micro_batches = 4;
  std::int64_t steps = 400;
  std::int64_t batch = 32;
  std::int64_t checkpoint_every = 100;
  std::int64_t sample = 300;
  std::int64_t texts = 1;
  bool cache = true;
  double lr = 0.003;
};

void add_options(CLI::App& app, GptOptions& options);
/// Throws torchspan::Error{kInvalid}, with a remedy, for options that do not fit this number of workers.
void check(const GptOptions& options, int world_size);

}  // namespace char_transformer
