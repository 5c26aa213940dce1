// Trains a small convolutional network on Fashion-MNIST on several ranks, each with a replica of the model:
//   torchspan run -n 2 fashion_mnist_ddp
// Every rank processes its part of every batch; gradients are averaged while backward runs. Then rank 0 trains
// the same model on the same batches alone, and compares the results and the speed. With --checkpoint, a training
// that was killed or preempted resumes:
//   torchspan run -n 2 --max-restarts 3 fashion_mnist_ddp --checkpoint checkpoints
#include <cstdint>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/Parallel.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <torchspan/core/preemption.h>
#include <torchspan/data_parallel.h>
#include <torchspan/torchspan.h>

#include "devices/devices.h"
#include "fashion_mnist/comparison.h"
#include "fashion_mnist/dataset.h"
#include "fashion_mnist/ddp_options.h"
#include "fashion_mnist/evaluation.h"
#include "fashion_mnist/model.h"
#include "fashion_mnist/team_report.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace fashion_mnist;

namespace {

/// The input of every training.
struct Job {
  ts::Session& session;
  const DdpOptions& options;
  const Dataset train_data, test_data;
  const std::optional<ts::Preemption>& preemption;  ///< with --checkpoint
};

/// Saves and restores what a team has reached, if --checkpoint is given. One process alone starts from the beginning.
class Checkpoints {
 public:
  Checkpoints(const Job& job, const Team& team) : job_(job), team_(team) {
    if (team.group == nullptr || job.options.checkpoint.empty()) return;
    manager_.emplace(job.session, ts::CheckpointOptions{.directory = job.options.checkpoint});
  }

  /// `loss` is this rank's sum in an epoch.
  void restore(const ConvNet& network, torch::optim::SGD& optimizer, ts::DataLoader<Batch>& batches,
               double& loss) {
    if (!manager_) return;
    manager_->add("network", network);
    manager_->add("optimizer", optimizer);
    manager_->add("batches", batches);
    manager_->add_per_rank("loss", loss);
    manager_->restore();
  }
  /// Saves the state if that is due. Returns whether the job must end now, on all ranks if any of them got the signal.
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

/// Runs one step and returns the sum of the losses of this rank's images. `weight` is that of a ts::DataStep.
template <class Model>
double train_step(Model& model, torch::optim::Optimizer& optimizer, const Batch& mine, double weight) {
  optimizer.zero_grad();
  const torch::Tensor sum = torch::nll_loss(model.forward(mine.images), mine.labels, {}, at::Reduction::Sum);
  (sum * weight).backward();
  optimizer.step();
  return sum.item<double>();
}

/// Trains and tests `model`, whose parameters are those of `network`.
template <class Model>
TeamResult train(const Job& job, const Team& team, Model& model, const ConvNet& network) {
  const auto sgd = torch::optim::SGDOptions(job.options.lr).momentum(job.options.momentum);
  torch::optim::SGD optimizer(network->parameters(), sgd);
  double loss = 0;  // of this rank's images in this epoch
  ts::DataLoader batches(
      job.train_data,
      {.batch = job.options.batch, .rank = team.rank, .size = team.size, .seed = job.options.seed});
  const std::int64_t steps = job.options.epochs * batches.steps_per_epoch();
  Checkpoints checkpoints(job, team);
  checkpoints.restore(network, optimizer, batches, loss);
  TeamReport report(job.session, team, job.options, job.train_data.size());
  report.begin(batches.position());
  while (batches.position().step < steps) {
    const auto step = batches.next();
    const double sum = train_step(model, optimizer, step.data, step.weight);
    if (step.weight > 0) loss += sum;
    if (step.ends_epoch) report.end_epoch(std::exchange(loss, 0));
    report.step(step.epoch + 1, sum / static_cast<double>(step.data.size()), step.batch);
    const std::int64_t done = batches.position().step;
    if (checkpoints.after(done, done == steps)) return report.preempted(done, steps);
  }
  report.finish();
  const auto forward = [&](const torch::Tensor& images) { return model.forward(images); };
  return report.tested(accuracy(job.test_data, forward, team), job.test_data.size());
}

void train_together(const Job& job, c10::Device device) {
  const ts::Group group = job.session.group({.device = device});
  const Team team{.group = &group, .rank = group.rank(), .size = group.size(), .device = device};
  const auto type = job.options.use_double ? torch::kDouble : torch::kFloat;
  ConvNet network(job.options.seed, device, type);
  ts::DistributedDataParallel model(network, group);
  const TeamResult together = train(job, team, model, network);
  if (together.preempted) return;
  expect_equal_replicas(team, network);
  if (team.rank != 0 || !job.options.compare) return;
  ConvNet other(job.options.seed, device, type);
  const TeamResult alone = train(job, Team{.device = device}, *other, other);
  print_comparison(team, {together, network}, {alone, other}, job.options.threads);
}

void run(const DdpOptions& options) {
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
  train_together({session, options, train_data, test_data, preemption}, device);
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<DdpOptions>(
      "fashion_mnist_ddp",
      "Trains a small network on Fashion-MNIST, a part of each batch in each worker process.", argc, argv,
      add_options, run);
}
