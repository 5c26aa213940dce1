// Elastic training over two hosts, which are network namespaces connected by a virtual cable: a rank dies on either
// host, the others go on, and its replacement gets the state over an encrypted connection.
#include <csignal>
#include <fmt/format.h>
#include <fstream>
#include <sstream>

#include <torch/nn/modules/linear.h>
#include <torch/torch.h>

#include <torchspan/elastic.h>
#include <torchspan/optim.h>

#include "data/api/sampler.h"
#include "tests/cluster/hosts_suite.h"

namespace torchspan::hosts_elastic_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::join_on_host;
using testing::Process;
using testing::ProcessWorld;
using testing::require;

constexpr int kRanks = 4;
constexpr std::int64_t kSteps = 160, kFeatures = 300;
/// Of the first victim and of the second, which dies when the first has long been replaced.
constexpr std::array<std::int64_t, 2> kDeaths{15, 95};
/// Rank 0 waits for missing ranks at every multiple of it.
constexpr std::int64_t kGate = 20;

ElasticOptions elastic_options() {
  ElasticOptions options;
  options.samples = 90;
  options.batch = 16;
  options.seed = 3;
  options.step_timeout = seconds(30);
  return options;
}

torch::nn::Linear make_net() {
  torch::manual_seed(7);
  torch::nn::Linear net(kFeatures, 200);  // larger than one message between hosts
  net->to(torch::kDouble);
  return net;
}

optim::Optimizer make_optimizer(const torch::nn::Linear& net) {
  return {*net, optim::SGD{.lr = 0.01, .momentum = 0.9}};
}

template <class Model>
torch::Tensor loss_of(Model& model, const DataStep& step) {
  const torch::Tensor at = torch::tensor(step.samples, torch::kDouble).unsqueeze(1);
  const torch::Tensor features = torch::sin(at * torch::arange(1, kFeatures + 1, torch::kDouble));
  return (model.forward(features) - at.sin()).square().mean(1).sum() * step.weight;
}

std::string path_of(const std::string& name) {
  return fmt::format("{}/{}", std::getenv("TEST_FOLDER"), name);
}

void train() {
  Session session = join_on_host();
  const std::int64_t dies_at = std::atoll(std::getenv("TEST_DIES_AT"));
  torch::nn::Linear net = make_net();
  optim::Optimizer optimizer = make_optimizer(net);
  ElasticTrainer trainer(session, net, elastic_options());
  trainer.add("optimizer", optimizer);
  const std::string life = std::getenv("TEST_LIFE");
  if (life == "2") std::ofstream(path_of(fmt::format("replaced{}", session.rank()))) << "ready";
  std::vector<int> sizes;
  const bool complete = trainer.run(
      kSteps,
      [&](auto& model, const ElasticStep& step) {
        const Deadline limit = session.runtime().executor.deadline_in(seconds(20));
        while (step.rank == 0 && step.size < kRanks && step.number % kGate == 0 &&
               access(path_of(step.number < kDeaths[1] ? "replaced1" : "replaced2").c_str(), F_OK) != 0 &&
               !limit.passed(session.runtime().executor.now()))
          session.runtime().executor.sleep(milliseconds(5));
        loss_of(model, step).backward();
        if (step.number == dies_at) kill(getpid(), SIGKILL);
      },
      [&](const ElasticStep& step) {
        sizes.push_back(step.size);
        optimizer.step();
      });
  require(complete, "the trainer has the final state");
  torch::save(net, path_of(fmt::format("final{}", session.rank())));
  if (session.rank() == 0) {
    const auto second = sizes.begin() + kDeaths[1];
    require(std::count(sizes.begin(), second, kRanks - 1) > 0, "three ranks have trained without rank 1");
    require(*std::prev(second) == kRanks, "the replacement of rank 1 has trained, too");
    require(std::count(second, sizes.end(), kRanks - 1) > 0, "three ranks have trained without rank 2");
    require(sizes.back() == kRanks, "the replacement of rank 2 has trained, too");
  }
  session.worker().barrier();
  session.shutdown(seconds(30));
}

/// The same batches in one process.
torch::nn::Linear in_one_process() {
  torch::nn::Linear net = make_net();
  optim::Optimizer optimizer = make_optimizer(net);
  const ElasticOptions options = elastic_options();
  data::Sampler sampler({.samples = options.samples,
                         .batch = options.batch,
                         .batch_per_rank = options.batch_per_rank,
                         .seed = options.seed});
  DataPosition at;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(*net, sampler.step(at, 0, 1)).backward();
    optimizer.step();
    at = sampler.after(at, 1);
  }
  return net;
}

class ElasticOverHosts : public testing::Hosts {
 protected:
  Process& start_rank(ProcessWorld& world, int rank, std::int64_t dies_at, const char* life) {
    return start(
        world, rank, rank < 2 ? network_.near : network_.far, "hosts_elastic.train",
        {{"TEST_FOLDER", world.folder()}, {"TEST_DIES_AT", std::to_string(dies_at)}, {"TEST_LIFE", life}});
  }
};

TEST_F(ElasticOverHosts, GoesOnAfterTheDeathOfARankOnEitherHost) {
  const torch::nn::Linear expected = in_one_process();
  ProcessWorld world(kRanks);
  std::vector<Process*> living;
  for (int rank = 0; rank < kRanks; ++rank) {
    const bool is_victim = rank == 1 || rank == 2;
    living.push_back(
        &start_rank(world, rank, is_victim ? kDeaths[static_cast<std::size_t>(rank - 1)] : -1, "1"));
  }
  for (const int victim : {1, 2}) {
    SCOPED_TRACE(victim);
    Process*& process = living[static_cast<std::size_t>(victim)];
    ASSERT_TRUE(process->wait(world.executor(), seconds(60))) << process->output();
    ASSERT_EQ(process->exit_code(), 128 + SIGKILL) << process->output();
    process = &start_rank(world, victim, -1, "2");
  }
  for (Process* process : living) {
    ASSERT_TRUE(process->wait(world.executor(), seconds(90))) << process->output();
    EXPECT_EQ(process->exit_code(), 0) << process->output();
  }
  torch::nn::Linear first = make_net();
  torch::load(first, world.folder() + "/final0");
  EXPECT_TRUE(at::allclose(first->weight, expected->weight, 1e-9, 1e-12));
  for (int rank = 1; rank < kRanks; ++rank) {
    torch::nn::Linear other = make_net();
    torch::load(other, fmt::format("{}/final{}", world.folder(), rank));
    EXPECT_TRUE(at::equal(first->weight, other->weight)) << "rank " << rank;
    EXPECT_TRUE(at::equal(first->bias, other->bias)) << "rank " << rank;
  }
}

const testing::Scenarios kScenarios("hosts_elastic", {{"train", train}});

}  // namespace
}  // namespace torchspan::hosts_elastic_test
