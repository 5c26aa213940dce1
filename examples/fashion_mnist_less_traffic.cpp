// Trains the same network on Fashion-MNIST four times, and prints what each way sent and how good it got:
//   torchspan run -n 2 fashion_mnist_less_traffic
// The ways: gradients averaged at each step (DistributedDataParallel), compressed by PowerSGD, parameters averaged
// every few steps (local SGD), and an outer optimizer for the change of many steps (DiLoCo).
#include <fmt/format.h>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/types.h>

#include <torchspan/torchspan.h>

#include "fashion_mnist/dataset.h"
#include "fashion_mnist/less_traffic_options.h"
#include "fashion_mnist/model.h"
#include "fashion_mnist/training.h"
#include "programs/run_program.h"

namespace ts = torchspan;
namespace dp = torchspan::data_parallel;
using namespace fashion_mnist;

namespace {

/// One training: the replica of this rank, and what it has sent.
struct Training {
  const LessTrafficOptions& options;
  ts::Group group;
  ConvNet network{options.seed};
  std::uint64_t sent = 0;

  std::uint64_t size() const {
    std::uint64_t bytes = 0;
    for (const auto& parameter : network->parameters()) bytes += parameter.nbytes();
    return bytes;
  }
  dp::CommHook counted(dp::CommHook hook) {
    return [this, hook = std::move(hook)](const dp::GradientBucket& bucket, const ts::Group& ranks) {
      sent += bucket.buffer.nbytes();
      return hook(bucket, ranks);
    };
  }
};

using Forward = std::function<torch::Tensor(torch::Tensor)>;

/// Trains the replica; calls `after_step` after each step of its optimizer.
void train(ts::Session& session, const Dataset& data, Training& training, const std::string& name,
           const Forward& forward, const std::function<void()>& after_step) {
  const LessTrafficOptions& options = training.options;
  ts::optim::Optimizer optimizer(*training.network, ts::optim::SGD{.lr = options.lr, .momentum = 0.9});
  Meter meter(session, options, data.size(), name);
  ts::DataLoader batches(data, {.batch = options.batch,
                                .rank = training.group.rank(),
                                .size = training.group.size(),
                                .seed = options.seed});
  while (batches.position().epoch < options.epochs) {
    const auto step = batches.next();
    optimizer.zero_grad();
    const Batch& mine = step.data;
    const torch::Tensor sum = torch::nll_loss(forward(mine.images), mine.labels, {}, at::Reduction::Sum);
    (sum * step.weight).backward();
    optimizer.step();
    after_step();
    if (session.rank() == 0)
      meter.step(step.epoch + 1, sum.item<double>() / static_cast<double>(mine.size()), step.batch);
  }
  if (session.rank() == 0) meter.finish();
}

using Method = std::function<void(Training&)>;

std::vector<std::pair<std::string, Method>> methods(ts::Session& session, const Dataset& data) {
  const auto run = [&session, &data](Training& training, const std::string& name, dp::CommHook hook,
                                     const std::function<void()>& after_step) {
    ts::DistributedDataParallel model(training.network, training.group);
    model.register_comm_hook(std::move(hook), name);
    train(
        session, data, training, name, [&](torch::Tensor images) { return model(std::move(images)); },
        after_step);
  };
  return {{"every gradient",
           [=](Training& training) { run(training, "ddp", training.counted(dp::all_reduce_hook()), [] {}); }},
          {"PowerSGD",
           [=](Training& training) {
             const dp::PowerSgd power(training.options.power);
             run(training, "power_sgd", power.hook(), [] {});
             training.sent = power.traffic().sent;
           }},
          {"local SGD",
           [=](Training& training) {
             const std::int64_t start = training.options.power.start_iteration;
             std::int64_t step = 0;
             dp::ModelAverager averager(training.network->parameters(), training.group,
                                        training.options.period, start);
             run(training, "local_sgd", dp::post_local_sgd_hook(start), [&] {
               if (++step <= start) training.sent += training.size();
               if (averager.step()) training.sent += training.size();
             });
             dp::ModelAverager(training.network->parameters(), training.group, 1).step();
           }},
          {"DiLoCo", [&session, &data](Training& training) {
             dp::DiLoCo diloco(training.network->parameters(), training.group, training.options.diloco);
             const auto forward = [&](const torch::Tensor& images) {
               return training.network->forward(images);
             };
             train(session, data, training, "diloco", forward, [&] {
               if (diloco.step()) training.sent += training.size();
             });
           }}};
}

void run(const LessTrafficOptions& options) {
  const Dataset train_data = load(options, Split::kTrain), test_data = load(options, Split::kTest);
  ts::Session session(ts::WorkerOptions::from_env());
  for (const auto& [name, method] : methods(session, train_data)) {
    Training training{options, session.group()};
    method(training);
    if (session.rank() != 0) continue;
    fmt::print("{:<15} test accuracy {:.2f} %, {:.1f} MB sent by each rank\n", name,
               100 * accuracy(test_data, training.network), static_cast<double>(training.sent) / 1e6);
  }
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<LessTrafficOptions>(
      "fashion_mnist_less_traffic",
      "Trains a small network on Fashion-MNIST in four ways that send more or less.", argc, argv, add_options,
      run);
}
