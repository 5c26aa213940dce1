#include "parameter_server/training.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>

#include <torchspan/core/error.h>

namespace parameter_server {

using fashion_mnist::ConvNet;

void add_options(CLI::App& app, Options& options) {
  fashion_mnist::add_training_options(app, options);
  app.add_option("--lr", options.lr, "learning rate")->check(CLI::Range(1e-9, 1e9))->capture_default_str();
  app.add_option("--momentum", options.momentum)->check(CLI::Range(0.0, 0.9999))->capture_default_str();
  app.add_option("--wait-for", options.wait_for,
                 "trainers whose gradients make one step; 0: all, which is as one process with whole batches")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1'000'000}))
      ->capture_default_str();
  app.add_flag("--double", options.is_double, "compute with 64 bits");
  app.add_flag("!--no-compare", options.compare, "do not train in one process afterwards");
}

fashion_mnist::Dataset load(const Part& part) {
  const auto data = fashion_mnist::load(part.data, fashion_mnist::Split::kTrain);
  return part.limit == 0 ? data : data.first(part.limit);
}

Gradients gradients_of(ConvNet network, const fashion_mnist::Batch& batch, double scale) {
  network->zero_grad();
  const at::Tensor images = batch.images.to(network->parameters().front().scalar_type());
  const at::Tensor loss =
      torch::nll_loss(network->forward(images), batch.labels, {}, at::Reduction::Sum) * scale;
  loss.backward();
  Gradients gradients{.values = {}, .loss = loss.item<double>()};
  if (!std::isfinite(gradients.loss)) {
    throw torchspan::Error(torchspan::ErrorKind::kInvalid,
                           "the loss is not a finite number: lower --lr or --momentum");
  }
  for (const at::Tensor& parameter : network->parameters()) gradients.values.push_back(parameter.grad());
  return gradients;
}

void set_parameters(ConvNet network, const std::vector<at::Tensor>& parameters) {
  const c10::NoGradGuard off;
  const std::vector<at::Tensor> own = network->parameters();
  for (std::size_t i = 0; i < own.size(); ++i) own[i].copy_(parameters.at(i));
}

ConvNet network_with(const std::vector<at::Tensor>& parameters) {
  ConvNet network(0);
  set_parameters(network, parameters);
  return network;
}

ConvNet train_in_one_process(const Options& options, const fashion_mnist::Dataset& data) {
  ConvNet network(options.seed);
  if (options.is_double) network->to(at::kDouble);
  torch::optim::SGD optimizer(network->parameters(),
                              torch::optim::SGDOptions(options.lr).momentum(options.momentum));
  for (std::int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    const auto order = options.seed + static_cast<std::uint64_t>(epoch);
    for (const at::Tensor& positions : fashion_mnist::shuffled_batches(data.size(), options.batch, order)) {
      gradients_of(network, data.batch(positions), 1 / static_cast<double>(positions.numel()));
      optimizer.step();
    }
  }
  return network;
}

double difference(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  double most = 0;
  for (std::size_t i = 0; i < left.size(); ++i)
    most = std::max(most, (left[i].detach() - right.at(i).detach()).abs().max().item<double>());
  return most;
}

}  // namespace parameter_server
