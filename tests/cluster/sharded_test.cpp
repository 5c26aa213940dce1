// Training with divided state over real processes: checkpoints for other numbers of ranks, and a rank that is killed.
#include <csignal>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>

#include <torch/torch.h>

#include <torchspan/sharded.h>
#include <torchspan/torchspan.h>

#include "tests/support/cluster_main.h"

namespace torchspan::sharded_test {
namespace {

using std::chrono::seconds;
using testing::ProcessWorld;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

at::Tensor values(at::IntArrayRef sizes, double seed) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return torch::arange(count, torch::kDouble).mul(0.71).add(seed).sin().reshape(sizes).mul(0.5);
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double seed) {
    weight = register_parameter("weight", values({30, 30}, seed));
    bias = register_parameter("bias", values({30}, seed + 1));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::linear(x, weight, bias)); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", Sharded<Block>(1));
    second = register_module("second", Sharded<Block>(2));
    head = register_parameter("head", values({30, 3}, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(second->forward(first->forward(x)), head); }
  Sharded<Block> first{nullptr}, second{nullptr};
  at::Tensor head;
};
TORCH_MODULE(Net);

template <class Model>
at::Tensor loss_of(Model& model, std::int64_t step) {
  return model(values({8, 30}, static_cast<double>(step))).pow(2).sum();
}

double sum_of(const Net& net) {
  double sum = 0;
  for (const at::Tensor& parameter : net->parameters()) sum += parameter.detach().abs().sum().item<double>();
  return sum;
}

void write_sum(Session& session, double sum) {
  if (session.rank() == 0) std::ofstream(variable("TEST_FOLDER") + "/sum") << fmt::format("{:.17g}", sum);
}

CheckpointOptions options_of(const std::string& name) {
  return {.directory = variable("TEST_FOLDER") + "/" + name};
}

/// Trains from the newest checkpoint to step TEST_LAST. All ranks have the same data, so any number of ranks computes
/// the same.
void train_fully_sharded() {
  Session session(WorkerOptions::from_env());
  {
    Net net;
    FullyShardedDataParallel<Net> model(net, session.group());
    optim::Optimizer optimizer(*net, optim::Adam{.lr = 0.01});
    CheckpointManager manager(session, options_of("fully"));
    manager.add("model", model);
    manager.add_source("optimizer", model.optimizer_source(optimizer));
    const int last = std::atoi(variable("TEST_LAST").c_str());
    for (std::int64_t step = manager.restore_or(0); step < last; ++step) {
      optimizer.zero_grad();
      loss_of(model, step).backward();
      optimizer.step();
      manager.save(step + 1);
    }
    manager.wait();
    model.with_full_parameters([&] { write_sum(session, sum_of(net)); });
  }
  session.shutdown();
}

template <class Optimizer>
void train_replicas(Session& session, DistributedDataParallel<Net>& model, Optimizer& optimizer,
                    const std::string& folder) {
  CheckpointManager manager(session, options_of(folder));
  manager.add("model", model);
  manager.add("optimizer", optimizer);
  const int last = std::atoi(variable("TEST_LAST").c_str());
  for (std::int64_t step = manager.restore_or(0); step < last; ++step) {
    optimizer.zero_grad();
    loss_of(model, step).backward();
    optimizer.step();
    manager.save(step + 1);
  }
  manager.wait();
  write_sum(session, sum_of(model.module()));
}

void train_zero() {
  Session session(WorkerOptions::from_env());
  {
    DistributedDataParallel<Net> model(Net(), session.group());
    ZeroRedundancyOptimizer optimizer(model, optim::Adam{.lr = 0.01});
    train_replicas(session, model, optimizer, "zero");
  }
  session.shutdown();
}

/// Continues a checkpoint of divided state without dividing anything.
void train_plain() {
  Session session(WorkerOptions::from_env());
  {
    DistributedDataParallel<Net> model(Net(), session.group());
    optim::Optimizer optimizer(*model.module(), optim::Adam{.lr = 0.01});
    train_replicas(session, model, optimizer, variable("TEST_FROM"));
  }
  session.shutdown();
}

void train_for_ever() {
  Session session(WorkerOptions::from_env());
  FullyShardedDataParallel<Net> model(Net(), session.group());
  optim::Optimizer optimizer(*model.module(), optim::Adam{.lr = 0.01});
  for (std::int64_t step = 0;; ++step) {
    optimizer.zero_grad();
    loss_of(model, step).backward();
    optimizer.step();
    if (step == 20)
      std::ofstream(fmt::format("{}/started{}", variable("TEST_FOLDER"), session.rank())) << step;
  }
}

void run_world(int ranks, const std::string& scenario, const std::map<std::string, std::string>& variables) {
  ProcessWorld world(ranks);
  for (int rank = 0; rank < ranks; ++rank) world.start(rank, scenario, variables);
  testing::expect_all_end_well(world, seconds(60));
}

double expected_sum(int steps) {
  Net net;
  optim::Optimizer optimizer(*net, optim::Adam{.lr = 0.01});
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(net, step).backward();
    optimizer.step();
  }
  return sum_of(net);
}

void continue_on(const std::vector<int>& sizes, const std::string& scenario, const std::string& folder) {
  testing::TemporaryFolder place;
  int steps = 0;
  const auto check = [&] {
    double sum = 0;
    std::ifstream(place.path() + "/sum") >> sum;
    EXPECT_NEAR(sum, expected_sum(steps), 1e-9) << "after " << steps << " steps";
    std::filesystem::remove(place.path() + "/sum");
  };
  for (const int size : sizes) {
    steps += 3;
    run_world(size, scenario, {{"TEST_FOLDER", place.path()}, {"TEST_LAST", std::to_string(steps)}});
    check();
  }
  steps += 3;
  run_world(2, "sharded.train_plain",
            {{"TEST_FOLDER", place.path()}, {"TEST_LAST", std::to_string(steps)}, {"TEST_FROM", folder}});
  check();
}

TEST(ShardedProcesses, FullyShardedContinuesOnOtherNumbersOfRanksAndAsReplicas) {
  continue_on({4, 2, 1}, "sharded.train_fully_sharded", "fully");
}

TEST(ShardedProcesses, ZeroContinuesOnOtherNumbersOfRanksAndAsReplicas) {
  continue_on({3, 2, 1}, "sharded.train_zero", "zero");
}

TEST(ShardedProcesses, TheOthersNameARankThatIsKilled) {
  testing::TemporaryFolder place;
  ProcessWorld world(3);
  for (int rank = 0; rank < 3; ++rank)
    world.start(rank, "sharded.train_for_ever",
                {{"TEST_FOLDER", place.path()}, {"TORCHSPAN_LOG_LEVEL", "off"}});
  const Deadline limit = world.executor().deadline_in(seconds(60));
  while (!std::filesystem::exists(place.path() + "/started1") && !limit.passed(world.executor().now()))
    world.executor().sleep(std::chrono::milliseconds(2));
  world.process(1).kill(SIGKILL);
  for (const std::size_t rank : {0, 2}) {
    EXPECT_TRUE(world.process(rank).wait(world.executor(), seconds(60))) << "rank " << rank << " still runs";
    EXPECT_EQ(world.process(rank).exit_code(), 1);
    EXPECT_THAT(world.process(rank).output(), ::testing::HasSubstr("rank 1"));
  }
}

const testing::Scenarios kScenarios("sharded", {{"train_fully_sharded", train_fully_sharded},
                                                {"train_zero", train_zero},
                                                {"train_plain", train_plain},
                                                {"train_for_ever", train_for_ever}});

}  // namespace
}  // namespace torchspan::sharded_test
