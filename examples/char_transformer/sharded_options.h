#pragma once
#include <cstdint>

#include "char_transformer/training_options.h"

namespace char_transformer {

/// Options of the program gpt_sharded.
struct ShardedOptions : TrainingOptions {
  ShardedOptions();

  std::int64_t memory = 0;  ///< MiB that each rank may allocate; 0: all
  bool bfloat16 = false;
};

void add_options(CLI::App& app, ShardedOptions& options);
/// Throws torchspan::Error{kInvalid}, with a remedy, for options that do not fit this number of ranks.
void check(const ShardedOptions& options, int world_size);

}  // namespace char_transformer
