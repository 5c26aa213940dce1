#pragma once
#include <optional>
#include <string>

#include <torchspan/optim/functional.h>

#include "fashion_mnist/training.h"

namespace fashion_mnist {

/// Options of the program fashion_mnist_model_parallel.
struct ModelParallelOptions : TrainingOptions {
  ModelParallelOptions() { epochs = 2; }

  std::string optimizer = "sgd";
  std::optional<double> lr;
  std::string graph;  ///< file; empty: none
};

void add_options(CLI::App& app, ModelParallelOptions& options);
/// Throws torchspan::Error{kInvalid} for a wrong learning rate.
torchspan::optim::OptimizerSpec optimizer_spec(const ModelParallelOptions& options);

}  // namespace fashion_mnist
