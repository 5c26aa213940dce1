// Trains a small convolutional network on Fashion-MNIST, with its two halves in two worker processes:
//   torchspan run -n 3 fashion_mnist_model_parallel
// Worker 0 reads the data and trains; worker 1 holds the first half of the model, worker 2 the second. Without
// the launcher, the same program does everything in one process.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fmt/format.h>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/types.h>

#include <torchspan/torchspan.h>

#include "devices/devices.h"
#include "fashion_mnist/dataset.h"
#include "fashion_mnist/model.h"
#include "fashion_mnist/training.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace fashion_mnist;

namespace {

struct Options : TrainingOptions {
  Options() { epochs = 2; }

  std::string optimizer = "sgd";
  std::optional<double> lr;
  std::string graph;
};

void add_options(CLI::App& app, Options& options) {
  add_training_options(app, options);
  add_checkpoint_options(app, options);
  devices::add_option(app, options.device);
  app.add_option("--lr", options.lr, "learning rate [0.05 for sgd, 0.01 for adagrad]");
  app.add_option("--optimizer", options.optimizer)
      ->check(CLI::IsMember({"sgd", "adagrad"}))
      ->capture_default_str();
  app.add_option("--graph", options.graph,
                 "write the first step's graph over all workers here, for dot -Tsvg");
}

ts::optim::OptimizerSpec optimizer_spec(const Options& options) {
  if (options.optimizer == "adagrad") return ts::optim::Adagrad{.lr = options.lr.value_or(0.01)};
  return ts::optim::SGD{.lr = options.lr.value_or(0.05), .momentum = 0.9};
}

/// The model in two halves: on workers 1 and 2 of three, or on the last workers of a smaller world.
struct Model {
  Model(ts::Worker& worker, const Options& options)
      : Model(worker, options, std::min(1, last(worker)), std::min(2, last(worker))) {}

  torch::Tensor forward(const torch::Tensor& images) { return classifier.forward(features.forward(images)); }
  void train(bool on) {
    features.train(on);
    classifier.train(on);
  }

  ts::RemoteModule<Features, std::uint64_t, std::string> features;
  ts::RemoteModule<Classifier, std::uint64_t, std::string> classifier;

 private:
  Model(ts::Worker& worker, const Options& options, int first, int second)
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

/// Saves what training has reached, if --checkpoint is given. Only the trainer has a manager: the owners of remote
/// modules write and read their state.
class Checkpoints {
 public:
  Checkpoints(ts::Session& session, const Options& options) : options_(options) {
    if (options.checkpoint.empty()) return;
    manager_.emplace(session, ts::CheckpointOptions{.directory = options.checkpoint,
                                                    .participants = {session.worker().name()}});
  }

  /// Returns the number of steps that the restored state has made.
  std::int64_t restore(Model& model, ts::optim::DistributedOptimizer& optimizer) {
    if (!manager_) return 0;
    manager_->add("features", model.features);
    manager_->add("classifier", model.classifier);
    manager_->add("optimizer", optimizer);
    const std::int64_t step = manager_->restore_or(0);
    if (step > 0) fmt::print("resumed after step {}\n", step);
    std::fflush(stdout);
    return step;
  }
  void after(std::int64_t step, bool is_last) {
    if (!manager_ || !options_.saves_after(step, is_last)) return;
    manager_->save(step);
    if (is_last) manager_->wait();
  }

 private:
  const Options& options_;
  std::optional<ts::CheckpointManager> manager_;
};

double train_step(ts::Session& session, Model& model, ts::optim::DistributedOptimizer& optimizer,
                  const Batch& batch, const std::string& graph) {
  ts::autograd::Context context(session);
  const torch::Tensor loss = torch::nll_loss(model.forward(batch.images), batch.labels);
  if (!graph.empty()) write_graph(graph, context.explain({loss}));
  const auto value = loss.item<double>();
  if (!std::isfinite(value)) return value;
  context.backward(loss);
  optimizer.step(context);
  return value;
}

void train(ts::Session& session, Model& model, const Dataset& data, const Options& options) {
  ts::optim::DistributedOptimizer optimizer(session, optimizer_spec(options),
                                            {model.features, model.classifier});
  Checkpoints checkpoints(session, options);
  std::int64_t step = checkpoints.restore(model, optimizer);
  const std::int64_t steps_per_epoch = (data.size() + options.batch - 1) / options.batch;
  const std::int64_t steps = options.epochs * steps_per_epoch;
  Meter meter(session, options, data.size());
  meter.continue_after(step);
  std::vector<torch::Tensor> positions;
  while (step < steps) {
    const std::int64_t epoch = step / steps_per_epoch + 1, index = step % steps_per_epoch;
    if (positions.empty() || index == 0) {
      positions =
          shuffled_batches(data.size(), options.batch, options.seed + static_cast<std::uint64_t>(epoch));
    }
    const Batch batch = data.batch(positions[static_cast<std::size_t>(index)]);
    const double loss =
        train_step(session, model, optimizer, batch, meter.images() == 0 ? options.graph : "");
    if (!std::isfinite(loss)) {
      throw std::runtime_error(fmt::format("the loss is not a finite number in epoch {}: lower --lr", epoch));
    }
    ++step;
    checkpoints.after(step, step == steps);
    meter.step(epoch, loss, batch.size());
  }
  meter.finish();
  fmt::print("{}\n", meter.summary());
}

double accuracy(Model& model, const Dataset& data) {
  constexpr std::int64_t kTestBatch = 500;
  model.train(false);
  std::int64_t correct = 0;
  for (const torch::Tensor& positions : batches_in_order(data.size(), kTestBatch)) {
    const Batch batch = data.batch(positions);
    correct += model.forward(batch.images).argmax(1).eq(batch.labels).sum().item<std::int64_t>();
  }
  return static_cast<double>(correct) / static_cast<double>(data.size());
}

void print_row(const std::string& worker, const std::string& part, const WorkReport& report) {
  fmt::print("  {:<10} {:>8}  {:<12} {:>10} {:>14} {:>12.1f}\n", worker, report.process, part,
             report.parameters, report.forward_calls, report.cpu_seconds);
}

void print_what_ran_where(const std::string& trainer, Model& model) {
  fmt::print("  {:<10} {:>8}  {:<12} {:>10} {:>14} {:>12}\n", "worker", "process", "part", "parameters",
             "forward calls", "CPU seconds");
  print_row(trainer, "trainer", report_process());
  print_row(model.features.owner_name(), "features", model.features.rpc_sync(kReport));
  print_row(model.classifier.owner_name(), "classifier", model.classifier.rpc_sync(kReport));
}

void run(const Options& options) {
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
  ts::FunctionTable functions;
  functions.add(kFeatures, kClassifier, kReport);
  ts::Session session(worker_options, functions);
  if (session.rank() == 0) {
    Model model(session.worker(), options);
    train(session, model, *train_data, options);
    fmt::print("test accuracy {:.2f} % on {} images\n", 100 * accuracy(model, *test_data), test_data->size());
    print_what_ran_where(session.worker().name(), model);
  }
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>(
      "fashion_mnist_model_parallel",
      "Trains a small network on Fashion-MNIST, its two halves in two worker processes.", argc, argv,
      add_options, run);
}
