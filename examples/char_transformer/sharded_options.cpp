#include "char_transformer/sharded_options.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <torchspan/core/error.h>

namespace char_transformer {

ShardedOptions::ShardedOptions() {
  model = {.width = 512, .blocks = 8, .heads = 8, .dropout = 0};
  steps = 20;
  batch = 8;
  lr = 0.001;
}

void add_options(CLI::App& app, ShardedOptions& options) {
  add_training_options(app, options);
  app.add_option("--memory", options.memory,
                 "MiB that each rank may allocate in addition to what the start takes; 0: all")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 20))
      ->capture_default_str();
  app.add_flag("--bfloat16", options.bfloat16, "compute in bfloat16");
}

void check(const ShardedOptions& options, int world_size) {
  check(options.model);
  check_world_size(world_size);
  if (options.batch % world_size == 0) return;
  throw torchspan::Error(torchspan::ErrorKind::kInvalid,
                         fmt::format("--batch {} is not a multiple of {} ranks", options.batch, world_size));
}

}  // namespace char_transformer
