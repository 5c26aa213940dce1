// A pipeline over two hosts, which are network namespaces: its steps, and what its workers say when the hosts lose
// their connection.
#include <fmt/format.h>
#include <fstream>
#include <unistd.h>

#include <torch/torch.h>

#include <torchspan/pipeline.h>
#include <torchspan/torchspan.h>

#include "tests/cluster/hosts_suite.h"
#include "tests/support/errors.h"
#include "tests/support/slow_network.h"

namespace torchspan::hosts_pipeline_test {
namespace {

using pipeline::Layers;
using pipeline::Pipeline;
using pipeline::Schedule;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::join_on_host;
using testing::Process;
using testing::ProcessWorld;
using testing::require;
using testing::SlowNetwork;
using testing::TestNetwork;
using torchspan::testing::error_of;

constexpr int kWorkers = 4;
constexpr std::int64_t kWidth = 200;  // activations of some hundred kilobytes, which take several lanes

struct DenseImpl : torch::nn::Module {
  explicit DenseImpl(std::uint64_t seed) {
    weight = register_parameter(
        "weight", at::randn({kWidth, kWidth}, at::detail::createCPUGenerator(seed), at::kDouble) * 0.1);
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::matmul(x, weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Dense);

at::Tensor numbers(std::int64_t rows, std::uint64_t seed) {
  return at::randn({rows, kWidth}, at::detail::createCPUGenerator(seed), at::kDouble);
}
at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

/// One layer on each worker.
Pipeline make_pipeline(Session& session, Schedule schedule) {
  Layers layers;
  for (std::uint64_t layer = 0; layer < kWorkers; ++layer) layers.add<Dense>(layer);
  return Pipeline(session.worker(), layers,
                  {.balance = {1, 1, 1, 1}, .micro_batches = 4, .schedule = schedule});
}

/// Steps of the pipeline and of one process on the whole model have the same losses and gradients.
void train() {
  Session session = join_on_host();
  for (const Schedule schedule : {Schedule::k1F1B, Schedule::kArrival}) {
    Pipeline pipe = make_pipeline(session, schedule);
    std::vector<Dense> plain;
    for (std::uint64_t layer = 0; layer < kWorkers; ++layer) plain.emplace_back(layer);
    for (std::uint64_t step = 0; step < 3; ++step) {
      const at::Tensor x = numbers(400, 10 + step), y = numbers(400, 20 + step);
      const double loss = pipe.train_step(x, y, mean_square);
      at::Tensor z = x;
      for (Dense& layer : plain) z = layer->forward(z);
      const at::Tensor expected = mean_square(z, y);
      expected.backward();
      require(std::abs(loss - expected.item<double>()) < 1e-12, fmt::format("the loss of step {}", step));
    }
    require(at::allclose(pipe.parameters().at(0).grad(), plain[session.rank()]->weight.grad(), 1e-10, 1e-12),
            "the gradients of three steps");
  }
  session.shutdown(seconds(30));
}

/// The error names a worker of the other host, and that host or its address.
void require_other_host_named(const Error& error, bool is_near) {
  const std::string text = error.what();
  const auto has = [&](const std::string& word) { return text.find(word) != std::string::npos; };
  const auto names = [&](int rank) {
    return has(fmt::format("worker{} (rank {}, ", rank, rank)) ||
           has(fmt::format("'worker{}' (rank {})", rank, rank));
  };
  const int other = is_near ? 2 : 0;
  require(names(other) || names(other + 1),
          fmt::format("worker{} or worker{} in: {}", other, other + 1, text));
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  require(has(fmt::format(" on {})", host)) || has(is_near ? TestNetwork::kFar : TestNetwork::kNear),
          "its host in: " + text);
  require(error.kind() == ErrorKind::kDisconnected, text);
}

/// Trains until the network is cut, and once more. It stays in the world until all workers have their errors, so that
/// none sees the end of another one.
void lose_the_network() {
  Session session = join_on_host();
  Pipeline pipe = make_pipeline(session, Schedule::k1F1B);
  const at::Tensor x = numbers(400, 1), y = numbers(400, 2);
  pipe.train_step(x, y, mean_square);
  std::printf("ready\n");
  std::fflush(stdout);
  const auto train = [&] {
    while (true) pipe.train_step(x, y, mean_square);
  };
  const Error lost = error_of(train), again = error_of(train);
  std::printf("lost: %s\n", lost.what());
  std::fflush(stdout);
  while (access(std::getenv("TEST_ENDED"), F_OK) != 0) session.runtime().executor.sleep(milliseconds(10));
  for (const Error& error : {lost, again}) require_other_host_named(error, session.rank() < 2);
}

void start_all(ProcessWorld& world, const testing::TestHost& near, const testing::TestHost& far,
               const std::string& scenario) {
  for (int rank = 0; rank < kWorkers; ++rank) {
    const testing::TestHost& host = rank < 2 ? near : far;
    std::map<std::string, std::string> changes{{"MASTER_ADDR", TestNetwork::kNear},
                                               {"LOCAL_WORLD_SIZE", "2"},
                                               {"LOCAL_RANK", std::to_string(rank % 2)},
                                               {"TEST_HOST", rank < 2 ? "near" : "far"},
                                               {"TEST_ENDED", world.folder() + "/ended"}};
    changes.merge(host.variables());
    world.start(rank, scenario, std::move(changes));
  }
}

/// All workers report the loss within `limit` of the cut, and their errors are what lose_the_network() requires.
void expect_named_losses(ProcessWorld& world, const std::function<void()>& cut) {
  const auto says = [&](std::size_t rank, const std::string& word, Duration limit) {
    const Deadline deadline = world.executor().deadline_in(limit);
    while (world.process(rank).output().find(word) == std::string::npos) {
      if (deadline.passed(world.executor().now())) return false;
      world.executor().sleep(milliseconds(10));
    }
    return true;
  };
  for (std::size_t rank = 0; rank < kWorkers; ++rank) {
    ASSERT_TRUE(says(rank, "ready", seconds(60))) << world.process(rank).output();
  }
  cut();
  for (std::size_t rank = 0; rank < kWorkers; ++rank) {
    EXPECT_TRUE(says(rank, "lost: ", seconds(20))) << rank << ": " << world.process(rank).output();
  }
  std::ofstream(world.folder() + "/ended") << "now";
  expect_all_end_well(world);
}

class PipelineOverHosts : public testing::Hosts {};

// peer: pipelining (documented) stages on several hosts: same
TEST_F(PipelineOverHosts, TrainsLikeThePlainModel) {
  ProcessWorld world(kWorkers);
  start_all(world, network_.near, network_.far, "hosts_pipeline.train");
  expect_all_end_well(world);
}

// peer: pipelining (documented) a lost host: better: every worker names a worker of the other host
TEST_F(PipelineOverHosts, NamesWhatItLostWhenTheCableIsPulled) {
  ProcessWorld world(kWorkers);
  start_all(world, network_.near, network_.far, "hosts_pipeline.lose_the_network");
  expect_named_losses(world, [&] { EXPECT_TRUE(network_.pull_cable()); });
}

class PipelineOverASlowLink : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!network_.trouble().empty()) GTEST_SKIP() << "no two hosts: " << network_.trouble();
  }
  const SlowNetwork network_{testing::LinkQuality{.delay = milliseconds(1)}};
};

TEST_F(PipelineOverASlowLink, TrainsLikeThePlainModel) {
  ProcessWorld world(kWorkers);
  start_all(world, network_.near, network_.far, "hosts_pipeline.train");
  expect_all_end_well(world);
}

TEST_F(PipelineOverASlowLink, NamesWhatItLostWhenPacketsVanish) {
  ProcessWorld world(kWorkers);
  start_all(world, network_.near, network_.far, "hosts_pipeline.lose_the_network");
  expect_named_losses(world, [&] { network_.set_cut(true); });
}

const testing::Scenarios kScenarios("hosts_pipeline",
                                    {{"train", train}, {"lose_the_network", lose_the_network}});

}  // namespace
}  // namespace torchspan::hosts_pipeline_test
