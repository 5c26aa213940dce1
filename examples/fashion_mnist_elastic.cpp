// Trains a small convolutional network on Fashion-MNIST on several ranks, and goes on when ranks die:
//   torchspan run -n 4 --max-replacements 100 fashion_mnist_elastic
// Kill any process but that of rank 0 while it runs: the others continue with the same batches, and the process that
// takes its place gets the state from one of them.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <fmt/format.h>
#include <unistd.h>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/types.h>

#include <torchspan/core/error.h>
#include <torchspan/elastic.h>
#include <torchspan/torchspan.h>

#include "fashion_mnist/dataset.h"
#include "fashion_mnist/model.h"
#include "fashion_mnist/training.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace fashion_mnist;

namespace {

struct Options : TrainingOptions {
  double lr = 0.05;
  int min_ranks = 1;
  std::int64_t die_at = -1;
};

void add_options(CLI::App& app, Options& options) {
  add_training_options(app, options);
  app.add_option("--lr", options.lr, "learning rate")->capture_default_str();
  app.add_option("--min-ranks", options.min_ranks, "training waits while fewer ranks are left")
      ->capture_default_str();
  app.add_option("--die-at", options.die_at,
                 "for a demonstration: the first process of rank 1 kills itself in this step");
}

/// A rank that died in the last moment is an error of shutdown(), but the training is complete.
void shut_down(ts::Session& session) {
  try {
    session.shutdown();
  } catch (const ts::Error& error) {
    if (error.kind() != ts::ErrorKind::kDisconnected) throw;
    fmt::print(stderr, "rank {}: {}\n", session.rank(), error.message());
  }
}

void run(const Options& options) {
  const Dataset train_data = load(options, Split::kTrain), test_data = load(options, Split::kTest);
  const auto worker_options = ts::WorkerOptions::from_env();
  const bool dies = options.die_at >= 0 && worker_options.environment.restart_count == 0;
  ts::Session session(worker_options);
  ConvNet network(options.seed, c10::kCPU);
  ts::optim::Optimizer optimizer(*network, ts::optim::SGD{.lr = options.lr, .momentum = 0.9});

  ts::ElasticTrainer trainer(session, network,
                             {.samples = train_data.size(),
                              .batch = options.batch,
                              .seed = options.seed,
                              .min_ranks = options.min_ranks});
  trainer.add("optimizer", optimizer);
  const std::int64_t steps = options.epochs * ((train_data.size() + options.batch - 1) / options.batch);
  int ranks = 0;
  const bool complete = trainer.run(
      steps,
      [&](auto& model, const ts::ElasticStep& step) {
        if (dies && session.rank() == 1 && step.number == options.die_at) std::raise(SIGKILL);
        if (step.rank == 0 && step.size != ranks) fmt::print("step {}: {} ranks\n", step.number, step.size);
        ranks = step.size;
        const Batch batch = train_data.batch(torch::tensor(step.samples));
        const auto loss = torch::nll_loss(model.forward(batch.images), batch.labels, {}, at::Reduction::Sum);
        (loss * step.weight).backward();
      },
      [&](const ts::ElasticStep&) { optimizer.step(); });
  if (complete && session.rank() == 0) {
    const auto& position = trainer.position();
    fmt::print("{} steps, {} epochs, test accuracy {:.2f} %\n", position.step, position.epoch,
               100 * accuracy(test_data, network));
  }
  shut_down(session);
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>(
      "fashion_mnist_elastic",
      "Trains a small network on Fashion-MNIST on several ranks, and goes on when ranks die.", argc, argv,
      add_options, run);
}
