// Serves a network while it is trained: one worker trains, one answers calls with the newest version, and all others call
// it all the time:
//   torchspan run -n 3 fashion_mnist_server
// Every call is answered, by one version of the network. With fewer workers, one has several roles.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fmt/format.h>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>

#include <torchspan/core/observation.h>
#include <torchspan/torchspan.h>

#include "fashion_mnist/client.h"
#include "fashion_mnist/dataset.h"
#include "fashion_mnist/model.h"
#include "fashion_mnist/server.h"
#include "fashion_mnist/training.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace fashion_mnist;

namespace {

struct Options : TrainingOptions {
  double lr = 0.05;
  std::int64_t publish_every = 50;
};

void add_options(CLI::App& app, Options& options) {
  add_training_options(app, options);
  app.add_option("--lr", options.lr, "learning rate")->capture_default_str();
  app.add_option("--publish-every", options.publish_every, "steps between two versions")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1'000'000}))
      ->capture_default_str();
}

std::int64_t steps_of(const Options& options, const Dataset& data) {
  return options.epochs * ((data.size() + options.batch - 1) / options.batch);
}
/// One version after every so many steps, and one at the end.
std::int64_t last_version(const Options& options, const Dataset& data) {
  return (steps_of(options, data) - 1) / options.publish_every + 1;
}

/// Trains, and sends each version to the server.
void train(ts::Session& session, const ts::RRef<Server>& server, const Options& options,
           const Dataset& data) {
  ConvNet network(options.seed, c10::kCPU);
  ts::optim::Optimizer optimizer(*network, ts::optim::SGD{.lr = options.lr, .momentum = 0.9});
  Meter meter(session, options, data.size());
  const std::int64_t steps = steps_of(options, data);
  std::int64_t step = 0, version = 0;
  const auto publish = [&] {
    std::vector<at::Tensor> parameters;
    for (const at::Tensor& parameter : network->parameters()) parameters.push_back(parameter.detach());
    server.rpc_sync(kPublish, ++version, parameters);
  };
  for (std::int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    for (const auto& positions : shuffled_batches(data.size(), options.batch, options.seed + epoch)) {
      const Batch batch = data.batch(positions);
      const at::Tensor loss = torch::nll_loss(network->forward(batch.images), batch.labels);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      meter.step(epoch, loss.item<double>(), batch.size());
      if (++step % options.publish_every == 0 || step == steps) publish();
    }
  }
  meter.finish();
  fmt::print("{}, {} versions\n", meter.summary(), version);
}

/// The first version, ten in between, and the last.
void show(const std::vector<Seen>& versions) {
  const std::size_t every = std::max<std::size_t>(1, versions.size() / 10);
  for (std::size_t i = 0; i < versions.size(); ++i) {
    if (i % every == 0 || i + 1 == versions.size()) fmt::print("{}\n", describe(versions[i]));
  }
}

void lead(ts::Session& session, const Options& options, const Dataset& data) {
  const int world = session.world_size(), first_client = std::min(2, world - 1);
  ts::Worker& worker = session.worker();
  const ts::RRef<Server> server = worker.remote(std::min(1, world - 1), kMakeServer, options.seed);
  Calls calls{.data = options.data, .limit = options.limit};
  const auto before = worker.rpc_sync(first_client, kCallServer, server, calls);
  calls.until = last_version(options, data);
  std::vector<ts::Future<std::vector<Seen>>> clients;
  for (int rank = first_client; rank < world; ++rank) {
    clients.push_back(
        worker.with({.timeout = std::chrono::hours(24)}).rpc_async(rank, kCallServer, server, calls));
  }
  train(session, server, options, data);
  const std::vector<std::vector<Seen>> during = ts::when_all(clients).wait();
  fmt::print("before training\n");
  show(before);
  fmt::print("while worker0 trains, {} answers {}\n", server.owner_name(),
             during.size() == 1 ? "one client" : fmt::format("{} clients", during.size()));
  show(merge(during));
}

void run(const Options& options) {
  const Dataset data = load(options, Split::kTrain);
  ts::FunctionTable functions;
  functions.add(kMakeServer, kClassify, kPublish, kCallServer);
  ts::Session session(ts::WorkerOptions::from_env(), functions);
  session.run([&](ts::Session& running) {
    if (running.rank() == 0) lead(running, options, data);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>("fashion_mnist_server",
                                        "Serves a network while another worker trains it.", argc, argv,
                                        add_options, run);
}
