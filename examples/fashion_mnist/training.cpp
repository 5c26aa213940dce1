#include "fashion_mnist/training.h"

#include <CLI/CLI.hpp>
#include <chrono>
#include <fmt/format.h>
#include <utility>

#include "fashion_mnist/evaluation.h"

namespace fashion_mnist {

void add_training_options(CLI::App& app, TrainingOptions& options) {
  constexpr std::int64_t kOne = 1, kMost = 1'000'000'000;
  app.add_option("--data", options.data, "folder of the four IDX files, gzipped or not")
      ->capture_default_str();
  app.add_option("--epochs", options.epochs)->check(CLI::Range(kOne, kMost))->capture_default_str();
  app.add_option("--batch", options.batch, "images per step")
      ->check(CLI::Range(kOne, kMost))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "seed of the initial parameters and of the order of images")
      ->capture_default_str();
  app.add_option("--limit", options.limit, "maximum number of images of each split; 0: all")
      ->check(CLI::Range(std::int64_t{0}, kMost))
      ->capture_default_str();
}

void add_checkpoint_options(CLI::App& app, TrainingOptions& options) {
  constexpr std::int64_t kOne = 1, kMost = 1'000'000'000;
  app.add_option("--checkpoint", options.checkpoint,
                 "folder: save the state regularly, and resume from the newest state there");
  app.add_option("--checkpoint-every", options.checkpoint_every, "steps from one saved state to the next")
      ->check(CLI::Range(kOne, kMost))
      ->capture_default_str();
}

Dataset load(const TrainingOptions& options, Split split) {
  const Dataset all = load(options.data, split);
  return options.limit == 0 ? all : all.first(options.limit);
}

double accuracy(const Dataset& data, ConvNet network) {
  network->eval();
  return accuracy(data, [&](const at::Tensor& images) { return network->forward(images); });
}

Meter::Meter(torchspan::Session& session, const TrainingOptions& options, std::int64_t images,
             std::string text)
    : session_(session), progress_(session) {
  report_.epochs = options.epochs;
  report_.steps = (images + options.batch - 1) / options.batch;
  report_.unit = "images";
  report_.text = std::move(text);
}

void Meter::continue_after(std::int64_t steps) {
  report_.epoch = steps / report_.steps + 1;
  report_.step = steps % report_.steps;
}

void Meter::step(std::int64_t epoch, double loss, std::int64_t images) {
  images_ += images;
  seconds_ = torchspan::to_seconds(progress_.elapsed());
  report_.step = epoch == report_.epoch ? report_.step + 1 : 1;
  report_.epoch = epoch;
  report_.loss = loss;
  report_.rate = images_per_second();
  progress_.report(report_);
  torchspan::log_scalar(session_, "loss", loss);
}

void Meter::finish() { progress_.finish(); }

double Meter::seconds() const { return seconds_; }

std::string Meter::summary() const {
  return fmt::format("trained on {} images in {:.1f} s: {:.0f} images/s", images_, seconds(),
                     images_per_second());
}

}  // namespace fashion_mnist
