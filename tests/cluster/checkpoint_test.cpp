// Checkpoints of real processes, some of which are killed.
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <sys/resource.h>

#include <torch/torch.h>

#include <torchspan/torchspan.h>

#include "tests/support/cluster_main.h"

namespace torchspan::checkpoint_test {
namespace {

using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::ProcessWorld;
using testing::require;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}
std::string checkpoint_folder() { return variable("TORCHSPAN_RUNTIME_DIR") + "/checkpoints"; }

torch::nn::Sequential wide_model() {
  return torch::nn::Sequential(torch::nn::Linear(64, 1024), torch::nn::Tanh(), torch::nn::Dropout(0.2),
                               torch::nn::Linear(1024, 8));
}

/// Of the last life of a training.
constexpr int kSteps = 40;

/// Trains a data-parallel model; saves after every step until TEST_LAST, from the newest checkpoint.
void train_replicas() {
  Session session(WorkerOptions::from_env());
  {
    torch::manual_seed(10 + session.rank());
    DistributedDataParallel ddp(wide_model(), session.group());
    optim::Optimizer optimizer(*ddp.module(), optim::AdamW{.lr = 0.01});
    std::int64_t samples = 0;
    CheckpointManager manager(session, {.directory = checkpoint_folder()});
    manager.add("model", ddp);
    manager.add("optimizer", optimizer);
    manager.add("samples", samples);
    const int last = std::atoi(variable("TEST_LAST").c_str());
    for (std::int64_t step = manager.restore_or(0); step < last; ++step) {
      require(samples == step * 4 * session.world_size(), "the data position fits the step");
      optimizer.zero_grad();
      ddp.forward(torch::randn({4, 64})).square().mean().backward();
      optimizer.step();
      samples += std::int64_t{4} * session.world_size();
      manager.save(step + 1);
      if (session.rank() == 0) std::ofstream(variable("TORCHSPAN_RUNTIME_DIR") + "/step") << step + 1;
      // A life that is to be killed stays below the steps of the last one, until a barrier reports the death.
      while (last > kSteps && step + 1 >= kSteps / 2) {
        session.group().barrier();
        session.runtime().executor.sleep(std::chrono::milliseconds(10));
      }
    }
    manager.wait();
    double sum = 0;
    for (const at::Tensor& parameter : ddp.module()->parameters())
      sum += parameter.detach().to(torch::kDouble).abs().sum().item<double>();
    std::ofstream(fmt::format("{}/sum{}", variable("TORCHSPAN_RUNTIME_DIR"), session.rank()))
        << fmt::format("{:.17g}", sum);
  }
  session.shutdown();
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  return text;
}

/// Runs the training to `last` steps in one life or, after SIGKILL of a rank, in several.
std::string trained(int last, const std::vector<int>& victims) {
  std::string sum;
  ProcessWorld world(2);
  std::size_t first = 0;
  for (const int victim : victims) {
    std::filesystem::remove(world.folder() + "/step");
    for (int rank = 0; rank < 2; ++rank)
      world.start(rank, "checkpoint.train_replicas",
                  {{"TEST_LAST", "1000000"}, {"TORCHSPAN_LOG_LEVEL", "off"}});
    const Deadline limit = world.executor().deadline_in(seconds(60));
    while (text_of(world.folder() + "/step").empty() && !limit.passed(world.executor().now()))
      world.executor().sleep(std::chrono::milliseconds(2));
    world.process(first + static_cast<std::size_t>(victim)).kill(SIGKILL);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(world.process(first + static_cast<std::size_t>(rank)).wait(world.executor(), seconds(60)));
      EXPECT_NE(world.process(first + static_cast<std::size_t>(rank)).exit_code(), 0);
    }
    first += 2;
  }
  for (int rank = 0; rank < 2; ++rank)
    world.start(rank, "checkpoint.train_replicas", {{"TEST_LAST", std::to_string(last)}});
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(world.process(first + rank).wait(world.executor(), seconds(120)));
    EXPECT_EQ(world.process(first + rank).exit_code(), 0) << world.process(first + rank).output();
  }
  sum = text_of(world.folder() + "/sum0");
  EXPECT_EQ(sum, text_of(world.folder() + "/sum1"));
  for (const auto& entry : std::filesystem::directory_iterator(world.folder() + "/checkpoints")) {
    EXPECT_EQ(entry.path().string().find(".partial"), std::string::npos) << entry.path() << " is left";
  }
  return sum;
}

TEST(CheckpointProcesses, ContinueBitForBitAfterARankIsKilled) {
  const std::string expected = trained(kSteps, {});
  EXPECT_FALSE(expected.empty());
  EXPECT_EQ(trained(kSteps, {0}), expected);
  EXPECT_EQ(trained(kSteps, {1, 0}), expected);
}

/// The second rank cannot write: its limit of a file's size is smaller than its file.
void save_with_a_failing_rank() {
  Session session(WorkerOptions::from_env());
  session.run([](Session& running) {
    at::Tensor table = torch::full({1 << 18}, running.rank());
    CheckpointManager manager(running, {.directory = checkpoint_folder()});
    manager.add_per_rank("table", table);
    manager.save(1);
    manager.wait();
    if (running.rank() == 1) {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit small{4096, 4096};
      setrlimit(RLIMIT_FSIZE, &small);
    }
    manager.save(2);
    try {
      manager.wait();
      require(false, "the save fails");
    } catch (const Error& error) {
      const std::string text = error.what();
      require(text.find("rank 1 ('worker1'): cannot write") != std::string::npos &&
                  text.find("File too large") != std::string::npos,
              text);
    }
    require(manager.restore() == 1, "the first checkpoint is the newest");
    running.worker().barrier();
  });
}

TEST(CheckpointProcesses, HaveNoCheckpointIfOneRankCannotWrite) {
  ProcessWorld world(2);
  world.start_all("checkpoint.save_with_a_failing_rank");
  expect_all_end_well(world, seconds(60));
  EXPECT_FALSE(std::filesystem::exists(world.folder() + "/checkpoints/step-00000002"));
}

const testing::Scenarios kScenarios("checkpoint", {{"train_replicas", train_replicas},
                                                   {"save_with_a_failing_rank", save_with_a_failing_rank}});

}  // namespace
}  // namespace torchspan::checkpoint_test
