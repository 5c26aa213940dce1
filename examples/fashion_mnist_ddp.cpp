// Trains a small convolutional network on Fashion-MNIST on several ranks, each with a replica of the model:
//   torchspan run -n 2 fashion_mnist_ddp
// Every rank processes its part of every batch; gradients are averaged while backward runs. Then rank 0 trains
// the same model on the same batches alone, and compares the results and the speed. With --checkpoint, a training
// that was killed or preempted resumes:
//   torchspan run -n 2 --max-restarts 3 fashion_mnist_ddp --checkpoint checkpoints
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fmt/format.h>
#include <iterator>
#include <optional>
#include <string>
#include <unistd.h>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/Parallel.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <torchspan/core/error.h>
#include <torchspan/core/preemption.h>
#include <torchspan/data_parallel/distributed_data_parallel.h>
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
  double lr = 0.05;
  double momentum = 0.9;
  int threads = 1;
  bool compare = true;
  bool use_double = false;
};

void add_options(CLI::App& app, Options& options) {
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

void refuse(const std::string& text) { throw ts::Error(ts::ErrorKind::kInvalid, text); }

void check(const Options& options, int world_size) {
  if (!std::isfinite(options.lr) || options.lr <= 0) {
    refuse(fmt::format("--lr {}: give a learning rate above 0, such as 0.05", options.lr));
  }
  if (!(options.momentum >= 0 && options.momentum < 1)) {
    refuse(fmt::format("--momentum {}: give a number from 0 to below 1", options.momentum));
  }
  if (world_size < 1)
    refuse("this program needs a world of a fixed size; this one is open (WORLD_SIZE is 0)");
  if (options.batch < world_size) {
    refuse(fmt::format("--batch {} is less than the {} ranks that share each batch: give at least {}",
                       options.batch, world_size, world_size));
  }
}

/// The ranks that train together: those of a group, or this process alone.
struct Team {
  const ts::collective::Group* group = nullptr;
  int rank = 0;
  int size = 1;
  c10::Device device = c10::kCPU;

  std::string name() const {
    return group == nullptr ? "one process" : fmt::format("{} rank{}", size, size == 1 ? "" : "s");
  }
  /// This rank's part of the positions. Parts differ in size by at most one; if the last batch is smaller
  /// than the team, some are empty.
  torch::Tensor part(const torch::Tensor& positions) const {
    return positions.tensor_split(size)[static_cast<std::size_t>(rank)];
  }
  double sum(double mine) const {
    if (group == nullptr) return mine;
    return group->all_reduce(torch::full({1}, mine, at::device(device).dtype(torch::kDouble)))
        .wait()
        .item<double>();
  }
  void wait_for_each_other() const {
    if (group != nullptr) group->barrier();
  }
};

/// The input of every training.
struct Job {
  const Options& options;
  const Dataset train_data, test_data;
  ts::Session& session;
  const std::optional<ts::Preemption>& preemption;  ///< with --checkpoint

  Batch batch(const Dataset& data, const torch::Tensor& positions) const {
    Batch batch = data.batch(positions);
    if (options.use_double) batch.images = batch.images.to(torch::kDouble);
    return batch;
  }
};

/// The result of a training; only rank 0 knows the speed.
struct Result {
  std::int64_t first_epoch = 0;  ///< in which this process trains
  std::vector<double> losses;    ///< of this epoch and the next ones: the mean over all images
  double accuracy = 0;
  double images_per_second = 0;
  bool preempted = false;  ///< the state is saved, and training ends early
};

/// Saves and restores what training has reached, if --checkpoint is given. Training alone, for comparison, starts
/// from the beginning.
class Checkpoints {
 public:
  Checkpoints(const Job& job, const Team& team) : job_(job), team_(team) {
    if (team.group == nullptr || job.options.checkpoint.empty()) return;
    manager_.emplace(job.session, ts::CheckpointOptions{.directory = job.options.checkpoint});
  }

  /// Returns the number of steps that the restored state has made. `loss` is this rank's sum in an epoch.
  std::int64_t restore(const ConvNet& network, torch::optim::SGD& optimizer, double& loss) {
    if (!manager_) return 0;
    manager_->add("network", network);
    manager_->add("optimizer", optimizer);
    manager_->add_per_rank("loss", loss);
    return manager_->restore_or(0);
  }
  /// Saves the state if that is due. Returns whether the job must end now: all ranks agree, whichever of them got
  /// the signal.
  bool after(std::int64_t step, bool is_last) {
    if (!manager_) return false;
    const bool preempted = team_.sum(job_.preemption->requested() ? 1 : 0) > 0;
    if (preempted || job_.options.saves_after(step, is_last)) manager_->save(step);
    if (preempted || is_last) manager_->wait();
    return preempted;
  }

 private:
  const Job& job_;
  const Team& team_;
  std::optional<ts::CheckpointManager> manager_;
};

/// Runs one step and returns the sum of the losses of this rank's images. `weight` is ranks / images of the
/// whole batch, so the average of the weighted sums over ranks is the mean over the whole batch, however
/// uneven the parts are.
template <class Model>
double train_step(Model& model, torch::optim::Optimizer& optimizer, const Batch& mine, double weight) {
  optimizer.zero_grad();
  const torch::Tensor sum = torch::nll_loss(model.forward(mine.images), mine.labels, {}, at::Reduction::Sum);
  (sum * weight).backward();
  optimizer.step();
  return sum.item<double>();
}

template <class Model>
double accuracy(const Job& job, const Team& team, Model& model) {
  constexpr std::int64_t kTestBatch = 500;
  const torch::NoGradGuard no_grad;  // sends nothing, so ranks test independently
  std::int64_t correct = 0;
  for (const torch::Tensor& positions : batches_in_order(job.test_data.size(), kTestBatch)) {
    const Batch batch = job.batch(job.test_data, team.part(positions));
    correct += model.forward(batch.images).argmax(1).eq(batch.labels).sum().template item<std::int64_t>();
  }
  return team.sum(static_cast<double>(correct)) / static_cast<double>(job.test_data.size());
}

/// Notes the mean loss of an epoch, and resets this rank's sum.
void end_epoch(const Job& job, const Team& team, double& loss, Result& result) {
  const double mean = team.sum(loss) / static_cast<double>(job.train_data.size());
  if (!std::isfinite(mean)) {
    refuse(fmt::format("{}: the loss is not a finite number after epoch {}: lower --lr", team.name(),
                       result.first_epoch + std::ssize(result.losses) + 1));
  }
  result.losses.push_back(mean);
  loss = 0;
}

/// Trains and tests `model`, whose parameters are those of `network`; rank 0 shows the progress.
template <class Model>
Result train(const Job& job, const Team& team, Model& model, const ConvNet& network) {
  const Options& options = job.options;
  const auto sgd = torch::optim::SGDOptions(options.lr).momentum(options.momentum);
  torch::optim::SGD optimizer(network->parameters(), sgd);
  Result result;
  double loss = 0;
  Checkpoints checkpoints(job, team);
  std::int64_t step = checkpoints.restore(network, optimizer, loss);
  team.wait_for_each_other();  // so that reading the data is not measured
  std::optional<Meter> meter;
  if (team.rank == 0) {
    if (step > 0) fmt::print("resumed after step {}\n", step);
    std::fflush(stdout);
    meter.emplace(job.session, options, job.train_data.size(), team.name());
    meter->continue_after(step);
  }
  const std::int64_t steps_per_epoch = (job.train_data.size() + options.batch - 1) / options.batch;
  const std::int64_t steps = options.epochs * steps_per_epoch;
  result.first_epoch = step / steps_per_epoch;
  std::vector<torch::Tensor> batches;
  while (step < steps) {
    const std::int64_t epoch = step / steps_per_epoch, index = step % steps_per_epoch;
    if (batches.empty() || index == 0) {
      const std::uint64_t order = options.seed + static_cast<std::uint64_t>(epoch) + 1;
      batches = shuffled_batches(job.train_data.size(), options.batch, order);
    }
    const torch::Tensor& positions = batches[static_cast<std::size_t>(index)];
    const Batch mine = job.batch(job.train_data, team.part(positions));
    const double weight = static_cast<double>(team.size) / static_cast<double>(positions.numel());
    const double sum = train_step(model, optimizer, mine, weight);
    loss += sum;
    if (++step % steps_per_epoch == 0) end_epoch(job, team, loss, result);
    if (meter) meter->step(epoch + 1, sum / static_cast<double>(mine.size()), positions.numel());
    if (checkpoints.after(step, step == steps)) {
      if (meter) fmt::print("preempted: the state after step {} of {} is saved\n", step, steps);
      result.preempted = true;
      return result;
    }
  }
  if (meter) meter->finish();
  result.accuracy = accuracy(job, team, model);
  if (!meter) return result;
  result.images_per_second = meter->images_per_second();
  for (std::size_t i = 0; i < result.losses.size(); ++i) {
    fmt::print("{}: epoch {}, mean loss {:.6f}\n", team.name(),
               result.first_epoch + static_cast<std::int64_t>(i) + 1, result.losses[i]);
  }
  fmt::print("{}: {}\n", team.name(), meter->summary());
  fmt::print("{}: test accuracy {:.2f} % on {} images\n", team.name(), 100 * result.accuracy,
             job.test_data.size());
  return result;
}

ConvNet new_network(const Options& options, c10::Device device) {
  ConvNet network(options.seed, device);
  if (options.use_double) network->to(torch::kDouble);
  return network;
}

torch::Tensor flat_parameters(const ConvNet& network) {
  std::vector<torch::Tensor> flat;
  for (const torch::Tensor& parameter : network->parameters()) flat.push_back(parameter.detach().flatten());
  return torch::cat(flat);
}

/// Throws on all ranks if any bit of a parameter differs.
void expect_equal_replicas(const ts::collective::Group& group, const ConvNet& network) {
  const torch::Tensor most = group.all_reduce(flat_parameters(network), ts::collective::kMax).wait();
  const torch::Tensor least = group.all_reduce(flat_parameters(network), ts::collective::kMin).wait();
  if (most.equal(least)) return;
  refuse(fmt::format(
      "parameters of the ranks differ by up to {:.1e}: they were not trained with equal gradients",
      (most - least).max().item<double>()));
}

void compare(const Job& job, const Team& team, const Result& together, const ConvNet& trained) {
  ConvNet network = new_network(job.options, team.device);
  const Result alone = train(job, Team{.device = team.device}, *network, network);
  const torch::Tensor reference = flat_parameters(network);
  const double difference = (flat_parameters(trained) - reference).abs().max().item<double>();
  double loss_difference = 0;
  for (std::size_t i = 0; i < together.losses.size(); ++i) {
    const double reference_loss = alone.losses[static_cast<std::size_t>(together.first_epoch) + i];
    loss_difference = std::max(loss_difference, std::abs(reference_loss - together.losses[i]));
  }
  fmt::print("{} against one process: losses differ by at most {:.1e}, parameters (up to {:.2f}) by {:.1e}\n",
             team.name(), loss_difference, reference.abs().max().item<double>(), difference);
  fmt::print(
      "speed-up {:.2f}: {:.0f} images/s with {}, {:.0f} with one process; {} thread{} each, {} cores\n",
      together.images_per_second / alone.images_per_second, together.images_per_second, team.name(),
      alone.images_per_second, job.options.threads, job.options.threads == 1 ? "" : "s",
      sysconf(_SC_NPROCESSORS_ONLN));
}

void train_together(ts::Session& session, const Job& job) {
  const ts::collective::Group group = session.group();
  const Team team{
      .group = &group, .rank = group.rank(), .size = group.size(), .device = job.train_data.images.device()};
  ConvNet network = new_network(job.options, team.device);
  ts::DistributedDataParallel model(network, group);
  const Result result = train(job, team, model, network);
  if (result.preempted) return;
  expect_equal_replicas(group, network);
  if (team.rank == 0 && job.options.compare) compare(job, team, result, network);
}

void run(const Options& options) {
  at::set_num_threads(options.threads);
  // Detects wrong options and wrong data before it waits for the other workers.
  const auto worker_options = ts::WorkerOptions::from_env();
  check(options, worker_options.environment.world_size);
  const c10::Device device = devices::of_rank(options.device, worker_options.environment.local_rank);
  const Dataset train_data = load(options, Split::kTrain).to(device),
                test_data = load(options, Split::kTest).to(device);
  std::optional<ts::Preemption> preemption;
  if (!options.checkpoint.empty()) preemption.emplace();
  ts::Session session(worker_options);
  train_together(session, {options, train_data, test_data, session, preemption});
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>(
      "fashion_mnist_ddp",
      "Trains a small network on Fashion-MNIST, a part of each batch in each worker process.", argc, argv,
      add_options, run);
}
