#include "federated/site.h"

#include <chrono>
#include <cmath>
#include <csignal>
#include <fmt/format.h>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/nn/functional/loss.h>

#include <torchspan/core/error.h>

namespace federated {

using fashion_mnist::Batch;
using fashion_mnist::ConvNet;
using fashion_mnist::Dataset;
using torchspan::Error;
using torchspan::ErrorKind;

SiteImpl::SiteImpl(const SiteOptions& options) {
  Dataset all = fashion_mnist::load(options.data, fashion_mnist::Split::kTrain);
  if (options.limit > 0) all = all.first(options.limit);
  const auto parts = partition(all.labels, options.clients, options.shards, options.seed);
  for (std::int64_t client = options.index; client < options.clients; client += options.sites) {
    const at::Tensor& positions = parts[static_cast<std::size_t>(client)];
    clients_[client] = {all.images.index_select(0, positions), all.labels.index_select(0, positions)};
  }
}

const Dataset& SiteImpl::client(std::int64_t number) const {
  const auto found = clients_.find(number);
  if (found == clients_.end())
    throw Error(ErrorKind::kInvalid, fmt::format("this site has no client {}", number));
  return found->second;
}

ConvNet network_with(const std::vector<at::Tensor>& parameters) {
  ConvNet network(0);
  network->to(parameters.front().scalar_type());
  const c10::NoGradGuard off;
  const std::vector<at::Tensor> own = network->parameters();
  for (std::size_t i = 0; i < own.size(); ++i) own[i].copy_(parameters.at(i));
  return network;
}

void descend(ConvNet network, const Dataset& data, const Task& task, const std::function<bool()>& between) {
  constexpr std::int64_t kAtOnce = 512;  // images whose activations are in memory
  const std::vector<at::Tensor> parameters = network->parameters();
  for (std::int64_t epoch = 0; epoch < task.epochs; ++epoch) {
    const std::int64_t batch = task.batch == 0 ? data.size() : task.batch;
    const auto order = task.seed + static_cast<std::uint64_t>(epoch);
    for (const at::Tensor& positions : fashion_mnist::shuffled_batches(data.size(), batch, order)) {
      if (!between()) return;
      network->zero_grad();
      for (const at::Tensor& some : positions.split(kAtOnce)) {
        const Batch images = data.batch(some);
        const at::Tensor logits = network->forward(images.images.to(parameters.front().scalar_type()));
        const at::Tensor loss = torch::nll_loss(logits, images.labels, {}, at::Reduction::Sum) /
                                static_cast<double>(positions.numel());
        if (!std::isfinite(loss.item<double>()))
          throw Error(ErrorKind::kInvalid, "the loss of a client is not a finite number: lower --lr");
        loss.backward();
      }
      const c10::NoGradGuard off;
      for (const at::Tensor& parameter : parameters) parameter.sub_(parameter.grad(), task.lr);
    }
  }
}

Update train_client(torchspan::Worker& worker, const torchspan::RRef<Site>& site, const Task& task) {
  const Dataset& data = site.local_value()->client(task.client);
  if (task.dies) std::raise(SIGKILL);
  const ConvNet network = network_with(task.parameters);
  const std::stop_token stop = worker.current_call()->stop;
  descend(network, data, task, [&] {
    if (task.is_slow) {
      const torchspan::BlockingScope blocking(worker);
      for (int i = 0; i < 100 && !stop.stop_requested(); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return !stop.stop_requested();
  });
  if (stop.stop_requested()) return {};
  Update update{.images = data.size(), .classes = {}, .parameters = {}};
  const at::Tensor classes = std::get<0>(at::_unique(data.labels, /*sorted=*/true));
  for (std::int64_t i = 0; i < classes.numel(); ++i)
    update.classes.push_back(classes[i].item<std::int64_t>());
  for (const at::Tensor& parameter : network->parameters()) update.parameters.push_back(parameter.detach());
  return update;
}

}  // namespace federated
