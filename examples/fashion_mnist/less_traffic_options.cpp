#include "fashion_mnist/less_traffic_options.h"

#include <CLI/CLI.hpp>

namespace fashion_mnist {

void add_options(CLI::App& app, LessTrafficOptions& options) {
  add_training_options(app, options);
  app.add_option("--lr", options.lr, "learning rate")->capture_default_str();
  app.add_option("--rank", options.power.rank, "PowerSGD: columns of the factors")->capture_default_str();
  app.add_option("--start", options.power.start_iteration,
                 "PowerSGD and local SGD: steps that send whole gradients first")
      ->capture_default_str();
  app.add_option("--period", options.period, "local SGD: steps between two averages")->capture_default_str();
  app.add_option("--outer-period", options.diloco.period, "DiLoCo: steps between two outer steps")
      ->capture_default_str();
  app.add_option("--outer-lr", options.diloco.outer_lr, "DiLoCo")->capture_default_str();
  app.add_option("--outer-momentum", options.diloco.outer_momentum, "DiLoCo; less for a short training")
      ->capture_default_str();
}

}  // namespace fashion_mnist
