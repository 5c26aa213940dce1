#include "char_transformer/gpt_options.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <torchspan/core/error.h>

namespace char_transformer {

void add_options(CLI::App& app, GptOptions& options) {
  const auto positive = CLI::Range(std::int64_t{1}, std::int64_t{1} << 20);
  app.add_option("--text", options.text, "a UTF-8 file")->capture_default_str();
  app.add_option("--replicas", options.replicas, "of each stage")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--steps", options.steps)->check(positive)->capture_default_str();
  app.add_option("--batch", options.batch, "rows per step, of all replicas")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--micro-batches", options.micro_batches, "of each replica")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--context", options.model.context, "characters per row")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--width", options.model.width)->check(positive)->capture_default_str();
  app.add_option("--blocks", options.model.blocks)->check(positive)->capture_default_str();
  app.add_option("--heads", options.model.heads)->check(positive)->capture_default_str();
  app.add_option("--dropout", options.model.dropout)->check(CLI::Range(0.0, 0.9))->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seed", options.model.seed)->capture_default_str();
  app.add_option("--checkpoint", options.checkpoint,
                 "folder: save the state regularly, and resume from the newest state there");
  app.add_option("--checkpoint-every", options.checkpoint_every, "steps from one saved state to the next")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--prompt", options.prompt, "beginning of the text to write")->capture_default_str();
  app.add_option("--sample", options.sample, "characters to write at the end")->capture_default_str();
  app.add_option("--texts", options.texts, "written at the same time")
      ->check(positive)
      ->capture_default_str();
  app.add_flag("--cache,!--no-cache", options.cache, "keep keys and values at their stages while writing");
}

void check(const GptOptions& options, int world_size) {
  const auto refuse = [](const std::string& why) {
    throw torchspan::Error(torchspan::ErrorKind::kInvalid, why);
  };
  if (options.model.width % options.model.heads != 0)
    refuse(
        fmt::format("--width {} is not a multiple of --heads {}", options.model.width, options.model.heads));
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
