#include "fashion_mnist/model_parallel_options.h"

#include <CLI/CLI.hpp>

#include <torchspan/optim/algorithms.h>

#include "devices/devices.h"

namespace fashion_mnist {

void add_options(CLI::App& app, ModelParallelOptions& options) {
  add_training_options(app, options);
  add_checkpoint_options(app, options);
  devices::add_option(app, options.device);
  app.add_option("--lr", options.lr, "learning rate [0.05 for sgd, 0.01 for adagrad]");
  app.add_option("--optimizer", options.optimizer)
      ->check(CLI::IsMember({"sgd", "adagrad"}))
      ->capture_default_str();
  app.add_option("--graph", options.graph,
                 "write the first step's graph over all workers here, for dot -Tsvg");
}

torchspan::optim::OptimizerSpec optimizer_spec(const ModelParallelOptions& options) {
  namespace optim = torchspan::optim;
  if (options.optimizer == "adagrad") return optim::Adagrad{.lr = options.lr.value_or(0.01)};
  return optim::SGD{.lr = options.lr.value_or(0.05), .momentum = 0.9};
}

}  // namespace fashion_mnist
