#include "fashion_mnist/ddp_options.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "devices/devices.h"

namespace fashion_mnist {

void add_options(CLI::App& app, DdpOptions& options) {
  add_training_options(app, options);
  add_checkpoint_options(app, options);
  devices::add_option(app, options.device);
  app.add_option("--lr", options.lr, "learning rate")->capture_default_str();
  app.add_option("--momentum", options.momentum)->capture_default_str();
  app.add_option("--threads", options.threads, "LibTorch threads in each process")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_flag("--double", options.use_double,
               "compute in double, so that rounding does not affect the comparison");
  app.add_flag("--compare,!--no-compare", options.compare,
               "afterwards, train the same model in one process and compare [on]");
}

void check(const DdpOptions& options, int world_size) {
  const auto refuse = [](const std::string& why) {
    throw torchspan::Error(torchspan::ErrorKind::kInvalid, why);
  };
  if (!std::isfinite(options.lr) || options.lr <= 0)
    refuse(fmt::format("--lr {}: give a learning rate above 0, such as 0.05", options.lr));
  if (!(options.momentum >= 0 && options.momentum < 1))
    refuse(fmt::format("--momentum {}: give a number from 0 to below 1", options.momentum));
  if (world_size < 1)
    refuse("this program needs a world of a fixed size; this one is open (WORLD_SIZE is 0)");
  if (options.batch < world_size)
    refuse(fmt::format("--batch {} is less than the {} ranks that share each batch: give at least {}",
                       options.batch, world_size, world_size));
}

}  // namespace fashion_mnist
