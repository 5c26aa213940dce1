// Trains a small convolutional network on Fashion-MNIST, with its two halves in two worker processes:
//   torchspan run -n 3 fashion_mnist_model_parallel
// Worker 0 reads the data and trains; worker 1 holds the first half of the model, worker 2 the second. Without
// the launcher, the same program does everything in one process.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fmt/format.h>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/types.h>

#include <torchspan/autograd.h>
#include <torchspan/checkpoint.h>
#include <torchspan/data.h>
#include <torchspan/optim.h>
#include <torchspan/session.h>

#include "devices/devices.h"
#include "fashion_mnist/dataset.h"
#include "fashion_mnist/evaluation.h"
#include "fashion_mnist/model.h"
#include "fashion_mnist/model_parallel_options.h"
#include "fashion_mnist/placement.h"
#include "fashion_mnist/training.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace fashion_mnist;

namespace {

/// The model in two halves: on workers 1 and 2 of three, or on the last workers of a smaller world.
struct Model {
  Model(ts::Worker& worker, const ModelParallelOptions& options)
      : Model(worker, options, std::min(1, last(worker)), std::min(2, last(worker))) {}

  torch::Tensor forward(const torch::Tensor& images) { return classifier.forward(features.forward(images)); }
  void train(bool on) {
    features.train(on);
    classifier.train(on);
  }

  ts::RemoteModule<Features, std::uint64_t, std::string> features;
  ts::RemoteModule<Classifier, std::uint64_t, std::string> classifier;

 private:
  Model(ts::Worker& worker, const ModelParallelOptions& options, int first, int second)
      : features(worker, first, kFeatures, options.seed, devices::of_rank(options.device, first).str()),
        classifier(worker, second, kClassifier, options.seed + 1,
                   devices::of_rank(options.device, second).str()) {}
  static int last(const ts::Worker& worker) { return worker.world_size() - 1; }
};

void write_graph(const std::string& path, const std::string& dot) {
  std::ofstream file(path);
  file << dot;
  file.close();
  if (!file) throw std::runtime_error(fmt::format("--graph {}: this file cannot be written", path));
}

double train_step(ts::Session& session, Model& model, ts::DistributedOptimizer& optimizer, const Batch& batch,
                  const std::string& graph) {
  ts::Context context(session);
  const torch::Tensor loss = torch::nll_loss(model.forward(batch.images), batch.labels);
  if (!graph.empty()) write_graph(graph, context.explain({loss}));
  const auto value = loss.item<double>();
  if (!std::isfinite(value)) return value;
  context.backward(loss);
  optimizer.step(context);
  return value;
}

void train(ts::Session& session, Model& model, const Dataset& data, const ModelParallelOptions& options) {
  ts::DistributedOptimizer optimizer(session, optimizer_spec(options), {model.features, model.classifier});
  ts::DataLoader batches(data, {.batch = options.batch, .rank = 0, .size = 1, .seed = options.seed});
  std::optional<ts::CheckpointManager> checkpoints;
  if (!options.checkpoint.empty()) {
    // Only the trainer has a manager: the owners of remote modules write and read their state.
    checkpoints.emplace(session, ts::CheckpointOptions{.directory = options.checkpoint,
                                                       .participants = {session.worker().name()}});
    checkpoints->add("features", model.features);
    checkpoints->add("classifier", model.classifier);
    checkpoints->add("optimizer", optimizer);
    checkpoints->add("batches", batches);
    if (const auto step = checkpoints->restore()) fmt::print("resumed after step {}\n", *step);
  }
  const std::int64_t steps = options.epochs * batches.steps_per_epoch();
  Meter meter(session, options, data.size());
  meter.continue_after(batches.position().step);
  while (batches.position().step < steps) {
    const auto batch = batches.next();
    const double loss =
        train_step(session, model, optimizer, batch.data, meter.images() == 0 ? options.graph : "");
    const std::int64_t epoch = batch.epoch + 1, done = batch.number + 1;
    if (!std::isfinite(loss))
      throw std::runtime_error(fmt::format("the loss is not a finite number in epoch {}: lower --lr", epoch));
    if (options.saves_after(done, done == steps)) checkpoints->save(done);
    meter.step(epoch, loss, batch.batch);
  }
  if (checkpoints) checkpoints->wait();
  meter.finish();
  fmt::print("{}\n", meter.summary());
}

/// Trains and tests the model, and prints what ran where.
void lead(ts::Session& session, const ModelParallelOptions& options, const Dataset& train_data,
          const Dataset& test_data) {
  Model model(session.worker(), options);
  train(session, model, train_data, options);
  model.train(false);
  const auto forward = [&](const torch::Tensor& images) { return model.forward(images); };
  fmt::print("test accuracy {:.2f} % on {} images\n", 100 * accuracy(test_data, forward), test_data.size());
  print_placement({{session.worker().name(), "trainer", report_process()},
                   {model.features.owner_name(), "features", model.features.rpc_sync(kReport)},
                   {model.classifier.owner_name(), "classifier", model.classifier.rpc_sync(kReport)}});
}

void run(const ModelParallelOptions& options) {
  optimizer_spec(options);  // detects wrong options before it waits for the other workers
  auto worker_options = ts::WorkerOptions::from_env();
  const auto& environment = worker_options.environment;
  worker_options.device_maps = devices::maps(options.device, environment);
  std::optional<Dataset> train_data, test_data;
  if (environment.rank == 0) {
    const auto device = devices::of_rank(options.device, environment.local_rank);
    train_data = load(options, Split::kTrain).to(device);
    test_data = load(options, Split::kTest).to(device);
  }
  const auto functions = ts::FunctionTable().add(kFeatures, kClassifier, kReport);
  // Builds no rooms but those that this program uses; ts::Session session(worker_options, functions) has all.
  using ts::checkpoint::CheckpointExtension, ts::optim::OptimExtension;
  auto session = ts::Session::with<OptimExtension, CheckpointExtension>(worker_options, functions);
  if (session.rank() == 0) lead(session, options, *train_data, *test_data);
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<ModelParallelOptions>(
      "fashion_mnist_model_parallel",
      "Trains a small network on Fashion-MNIST, its two halves in two worker processes.", argc, argv,
      add_options, run);
}
