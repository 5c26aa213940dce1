#include "recommender/options.h"

#include <CLI/CLI.hpp>

namespace recommender {

void add_options(CLI::App& app, Options& options) {
  constexpr std::int64_t kOne = 1, kMost = 1'000'000'000;
  app.add_option("--data", options.data, "CSV file of ratings")->capture_default_str();
  app.add_option("--epochs", options.epochs)->check(CLI::Range(kOne, kMost))->capture_default_str();
  app.add_option("--batch", options.batch, "ratings per step")
      ->check(CLI::Range(kOne, kMost))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "seed of the held-out ratings and of the order")
      ->capture_default_str();
  app.add_option("--lr", options.lr, "initial learning rate")
      ->check(CLI::Range(1e-9, 1e3))
      ->capture_default_str();
}

}  // namespace recommender
