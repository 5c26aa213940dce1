#include "char_transformer/training_options.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <torchspan/core/error.h>

namespace char_transformer {

void add_training_options(CLI::App& app, TrainingOptions& options) {
  const auto positive = CLI::Range(std::int64_t{1}, std::int64_t{1} << 20);
  app.add_option("--text", options.text, "a UTF-8 file")->capture_default_str();
  app.add_option("--steps", options.steps)->check(positive)->capture_default_str();
  app.add_option("--batch", options.batch, "rows per step, of all ranks")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--context", options.model.context, "characters per row")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--width", options.model.width)->check(positive)->capture_default_str();
  app.add_option("--blocks", options.model.blocks)->check(positive)->capture_default_str();
  app.add_option("--heads", options.model.heads)->check(positive)->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seed", options.model.seed)->capture_default_str();
}

void add_pipeline_options(CLI::App& app, PipelineTrainingOptions& options) {
  add_training_options(app, options);
  app.add_option("--dropout", options.model.dropout)->check(CLI::Range(0.0, 0.9))->capture_default_str();
  app.add_option("--micro-batches", options.micro_batches, "of each replica")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--checkpoint", options.checkpoint,
                 "folder: save the state regularly, and resume from the newest state there");
  app.add_option("--checkpoint-every", options.checkpoint_every, "steps from one saved state to the next")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--prompt", options.prompt, "beginning of the text to write")
      ->check([](const std::string& prompt) {
        return std::string(prompt.empty() ? "give at least one character" : "");
      })
      ->capture_default_str();
  app.add_option("--sample", options.sample, "characters to write at the end")->capture_default_str();
}

void check(const ModelOptions& options) {
  if (options.width % options.heads == 0) return;
  throw torchspan::Error(
      torchspan::ErrorKind::kInvalid,
      fmt::format("--width {} is not a multiple of --heads {}", options.width, options.heads));
}

void check_world_size(int world_size) {
  if (world_size >= 1) return;
  throw torchspan::Error(torchspan::ErrorKind::kInvalid,
                         "this program needs a world of a fixed size; this one is open (WORLD_SIZE is 0)");
}

}  // namespace char_transformer
