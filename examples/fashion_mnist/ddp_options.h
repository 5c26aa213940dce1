#pragma once
#include "fashion_mnist/training.h"

namespace fashion_mnist {

/// Options of the program fashion_mnist_ddp.
struct DdpOptions : TrainingOptions {
  double lr = 0.05;
  double momentum = 0.9;
  int threads = 1;
  bool compare = true;
  bool use_double = false;
};

void add_options(CLI::App& app, DdpOptions& options);
/// Throws torchspan::Error{kInvalid}, with a remedy, for options that do not fit this number of ranks.
void check(const DdpOptions& options, int world_size);

}  // namespace fashion_mnist
