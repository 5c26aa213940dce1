// Trains a small network on Fashion-MNIST with a parameter server. Rank 0 has the network and its optimizer; each other
// worker computes gradients for its part of a batch, sends them, and waits for the next version:
//   torchspan run -n 3 parameter_server
// The server's handler returns a future. When the gradients of all trainers are there, one step answers all of them. With
// --wait-for K, the gradients of any K trainers make a step. With one worker, the program does the same in one process.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fmt/format.h>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/core/observation.h>
#include <torchspan/torchspan.h>

#include "fashion_mnist/dataset.h"
#include "fashion_mnist/model.h"
#include "parameter_server/server.h"
#include "parameter_server/training.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace parameter_server;
using fashion_mnist::ConvNet;

namespace {

/// Runs on each trainer, at the same time.
Report train(ts::Worker& worker, const ts::RRef<ParameterServer>& server, const Part& part) {
  const fashion_mnist::Dataset data = load(part);
  ConvNet network(part.seed);
  if (part.is_double) network->to(at::kDouble);
  Version version = server.rpc_sync(kFetch);
  ts::Progress progress(worker);
  ts::ProgressReport shown;
  shown.epochs = part.epochs;
  shown.steps = (data.size() + part.batch - 1) / part.batch;
  shown.unit = "images";
  Report report;
  for (shown.epoch = 1; shown.epoch <= part.epochs; ++shown.epoch) {
    shown.step = 0;
    const auto order = part.seed + static_cast<std::uint64_t>(shown.epoch);
    for (const at::Tensor& positions : fashion_mnist::shuffled_batches(data.size(), part.batch, order)) {
      set_parameters(network, version.parameters);
      const fashion_mnist::Batch mine =
          data.batch(positions.tensor_split(part.trainers)[static_cast<std::size_t>(part.trainer)]);
      // The server takes the mean over the trainers, whose parts may differ in size.
      const Gradients gradients = gradients_of(
          network, mine, static_cast<double>(part.trainers) / static_cast<double>(positions.numel()));
      version = worker.rpc_sync(server.owner(), kUpdateAndFetch, server, part.trainer, version.step,
                                gradients.values);
      report.images += mine.size();
      report.seconds = ts::to_seconds(progress.elapsed());
      report.loss = gradients.loss;
      ++shown.step;
      shown.loss = report.loss;
      shown.rate = static_cast<double>(report.images * part.trainers) / report.seconds;
      if (part.trainer == 0) progress.report(shown);
    }
  }
  server.rpc_sync(kLeave);
  if (part.trainer == 0) progress.finish();
  return report;
}
constexpr ts::Function<train> kTrain{"train"};

void lead(ts::Session& session, const Options& options, const fashion_mnist::Dataset& test) {
  ts::Worker& worker = session.worker();
  const std::int64_t trainers = std::max(1, session.world_size() - 1);
  const std::int64_t wait_for = options.wait_for == 0 ? trainers : options.wait_for;
  if (wait_for > trainers || options.batch < trainers) {
    throw ts::Error(
        ts::ErrorKind::kInvalid,
        fmt::format("--wait-for {} and --batch {} do not fit {} trainers: give at most {} and at least {}",
                    wait_for, options.batch, trainers, trainers, trainers));
  }
  const ParameterServer server(ServerOptions{.trainers = trainers,
                                             .wait_for = wait_for,
                                             .seed = options.seed,
                                             .lr = options.lr,
                                             .momentum = options.momentum,
                                             .is_double = options.is_double});
  const ts::RRef<ParameterServer> reference(worker, server);
  fmt::print("the network is on {}; {} of {} trainers make a step\n", worker.name(), wait_for, trainers);
  std::vector<ts::Future<Report>> trainings;
  for (std::int64_t trainer = 0; trainer < trainers; ++trainer) {
    const Part part{options.data, options.epochs,    options.batch, options.limit,
                    options.seed, options.is_double, trainer,       trainers};
    const int rank = static_cast<int>(trainer) + (session.world_size() > 1 ? 1 : 0);
    trainings.push_back(
        worker.with({.timeout = std::chrono::hours(24)}).rpc_async(rank, kTrain, reference, part));
  }
  Report all;
  for (const Report& report : ts::wait_all(trainings)) {
    all.images += report.images;
    all.seconds = std::max(all.seconds, report.seconds);
  }
  const Statistics did = server.ptr()->statistics();
  fmt::print("{} steps with {} gradients in {:.1f} s: {:.0f} images/s\n", did.steps, did.gradients,
             all.seconds, static_cast<double>(all.images) / all.seconds);
  fmt::print("between the version of a gradient and its use, the server took {:.2f} other steps\n",
             static_cast<double>(did.missed_steps) / static_cast<double>(did.gradients));
  const std::vector<at::Tensor> trained = server.ptr()->fetch().parameters;
  fmt::print("test accuracy {:.2f} %\n", 100 * fashion_mnist::accuracy(test, network_with(trained)));
  if (!options.compare) return;
  const ConvNet alone =
      train_in_one_process(options, fashion_mnist::load(options, fashion_mnist::Split::kTrain));
  fmt::print("one process: test accuracy {:.2f} %; its parameters differ by at most {:.1e}\n",
             100 * fashion_mnist::accuracy(test, network_with(alone->parameters())),
             difference(trained, alone->parameters()));
}

void run(const Options& options) {
  const auto worker_options = ts::WorkerOptions::from_env();
  const auto test = fashion_mnist::load(options, fashion_mnist::Split::kTest);
  ts::FunctionTable functions;
  functions.add(kTrain, kFetch, kUpdateAndFetch, kLeave);
  ts::Session session(worker_options, functions);
  session.run([&](ts::Session& running) {
    if (running.rank() == 0) lead(running, options, test);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>("parameter_server",
                                        "Trains a small network on Fashion-MNIST with a parameter server.",
                                        argc, argv, add_options, run);
}
