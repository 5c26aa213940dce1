#include "char_transformer/gpt_options.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <torchspan/core/error.h>

namespace char_transformer {

void add_options(CLI::App& app, GptOptions& options) {
  add_pipeline_options(app, options);
  app.add_option("--replicas", options.replicas, "of each stage")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--texts", options.texts, "written at the same time")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->capture_default_str();
  app.add_flag("--cache,!--no-cache", options.cache, "keep keys and values at their stages while writing");
}

void check(const GptOptions& options, int world_size) {
  const auto refuse = [](const std::string& why) {
    throw torchspan::Error(torchspan::ErrorKind::kInvalid, why);
  };
  check(options.model);
  check_world_size(world_size);
  if (world_size % options.replicas != 0)
    refuse(fmt::format("{} workers cannot be divided into {} replicas: start a multiple of {}", world_size,
                       options.replicas, options.replicas));
  if (world_size / options.replicas > options.model.blocks)
    refuse(fmt::format("{} stages cannot share {} blocks: give --blocks {}, or more --replicas",
                       world_size / options.replicas, options.model.blocks, world_size / options.replicas));
  if (options.batch < options.replicas)
    refuse(fmt::format("--batch {} has no row for each of {} replicas", options.batch, options.replicas));
}

}  // namespace char_transformer
