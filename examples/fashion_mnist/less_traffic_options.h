#pragma once
#include <torchspan/data_parallel.h>

#include "fashion_mnist/training.h"

namespace fashion_mnist {

/// Options of the program fashion_mnist_less_traffic.
struct LessTrafficOptions : TrainingOptions {
  double lr = 0.05;
  torchspan::PowerSgdOptions power{.rank = 2, .start_iteration = 50};
  std::int64_t period = 8;  ///< of local SGD
  torchspan::DiLoCoOptions diloco{.period = 32};
};

void add_options(CLI::App& app, LessTrafficOptions& options);

}  // namespace fashion_mnist
