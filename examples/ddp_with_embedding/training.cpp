#include "ddp_with_embedding/training.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <torch/optim/sgd.h>

#include <torchspan/core/error.h>

namespace ddp_with_embedding {

using torchspan::Error;
using torchspan::ErrorKind;

namespace {

void check_finite(double loss, std::int64_t epoch) {
  if (std::isfinite(loss)) return;
  throw Error(ErrorKind::kInvalid,
              fmt::format("the loss is not a finite number in epoch {}: lower --lr or --table-lr", epoch));
}

}  // namespace

void add_options(CLI::App& app, Options& options) {
  constexpr std::int64_t kOne = 1, kMost = 1'000'000'000;
  app.add_option("--data", options.data, "CSV file of ratings")->capture_default_str();
  app.add_option("--epochs", options.epochs)->check(CLI::Range(kOne, kMost))->capture_default_str();
  app.add_option("--batch", options.batch, "ratings per step, of all trainers together")
      ->check(CLI::Range(kOne, kMost))
      ->capture_default_str();
  app.add_option("--limit", options.limit, "maximum number of ratings; 0: all")
      ->check(CLI::Range(std::int64_t{0}, kMost))
      ->capture_default_str();
  app.add_option("--width", options.shape.width, "columns of the table")
      ->check(CLI::Range(kOne, std::int64_t{4096}))
      ->capture_default_str();
  app.add_option("--seed", options.shape.seed, "seed of parameters, held-out ratings and order")
      ->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate of the dense part")
      ->check(CLI::Range(1e-9, 1e9))
      ->capture_default_str();
  app.add_option("--table-lr", options.table_lr, "learning rate of the table")
      ->check(CLI::Range(1e-9, 1e9))
      ->capture_default_str();
  app.add_flag("--double", options.shape.is_double, "compute with 64 bits");
  app.add_flag("!--no-compare", options.compare, "do not train in one process afterwards");
}

recommender::Split load(const Options& options) {
  recommender::Ratings ratings = recommender::load(options.data);
  if (options.limit > 0 && options.limit < ratings.size())
    ratings = ratings.at(at::arange(options.limit, at::kLong));
  recommender::Split data = recommender::split(ratings, options.shape.seed);
  if (data.train.size() < options.batch) {
    throw Error(ErrorKind::kInvalid, fmt::format("--batch {}: there are {} ratings to train on; lower it",
                                                 options.batch, data.train.size()));
  }
  return data;
}

double mean_of(const recommender::Split& data) { return data.train.values.mean().item<double>(); }

std::vector<at::Tensor> batches_of(const Options& options, std::int64_t examples, std::int64_t epoch) {
  const auto seed = options.shape.seed + static_cast<std::uint64_t>(epoch);
  auto batches = at::randperm(examples, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong))
                     .split(options.batch);
  if (batches.back().numel() < options.batch) batches.pop_back();
  return batches;
}

at::Tensor loss_of(const at::Tensor& predicted, const at::Tensor& values, std::int64_t count) {
  return (predicted - values).square().sum() / static_cast<double>(count);
}

Report train_in_one_process(const Options& options, const Examples& examples, Table& table, Dense& dense) {
  torch::optim::SGD table_steps(table->parameters(), torch::optim::SGDOptions(options.table_lr));
  torch::optim::SGD dense_steps(dense->parameters(), torch::optim::SGDOptions(options.lr));
  Report report;
  for (std::int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    for (const at::Tensor& positions : batches_of(options, examples.size(), epoch)) {
      const Examples batch = examples.at(positions);
      table_steps.zero_grad();
      dense_steps.zero_grad();
      const at::Tensor loss = loss_of(dense->forward(table->forward(batch.bags), batch.circumstances),
                                      batch.values, batch.size());
      loss.backward();
      table_steps.step();
      dense_steps.step();
      report.losses.push_back(loss.item<double>());
      check_finite(report.losses.back(), epoch);
    }
  }
  report.dense = dense->parameters();
  return report;
}

Recorder::Recorder(torchspan::Worker& worker, const Options& options, bool shown)
    : options_(options), shown_(shown), progress_(worker) {
  line_.epochs = options.epochs;
  line_.unit = "ratings";
}

void Recorder::step(std::int64_t epoch, std::size_t steps, double loss) {
  check_finite(loss, epoch);
  report_.losses.push_back(loss);
  report_.seconds = torchspan::to_seconds(progress_.elapsed());
  line_.step = epoch == line_.epoch ? line_.step + 1 : 1;
  line_.epoch = epoch;
  line_.steps = static_cast<std::int64_t>(steps);
  line_.loss = loss;
  line_.rate =
      static_cast<double>(report_.losses.size()) * static_cast<double>(options_.batch) / report_.seconds;
  if (shown_) progress_.report(line_);
}

Report Recorder::finish(const Dense& dense) {
  if (shown_) progress_.finish();
  report_.dense = dense->parameters();
  return report_;
}

double root_mean_square_error(const Examples& examples, const at::Tensor& embedded, Dense& dense) {
  const c10::NoGradGuard off;
  return recommender::root_mean_square(dense->forward(embedded, examples.circumstances) - examples.values);
}

Roles::Roles(int world) : server(world - 1) {
  const int first = world > 2 ? 1 : 0;
  for (int rank = first; rank < std::max(first + 1, world - 1); ++rank) trainers.push_back(rank);
}
bool Roles::trains(int rank) const { return std::ranges::count(trainers, rank) > 0; }

double difference(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  double most = 0;
  for (std::size_t i = 0; i < left.size(); ++i)
    most = std::max(most, (left[i].detach() - right.at(i).detach()).abs().max().item<double>());
  return most;
}

double difference(const std::vector<double>& left, const std::vector<double>& right) {
  double most = 0;
  for (std::size_t i = 0; i < left.size(); ++i) most = std::max(most, std::abs(left[i] - right.at(i)));
  return most;
}

}  // namespace ddp_with_embedding
