// Pipelines across real processes.
#include <fmt/format.h>
#include <fstream>

#include <torch/torch.h>

#include <torchspan/pipeline/pipeline.h>
#include <torchspan/session/session.h>

#include "tests/support/cluster_main.h"

namespace torchspan {
namespace {

using pipeline::Checkpoint;
using pipeline::Layers;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Schedule;
using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::ProcessWorld;
using testing::require;

struct DenseImpl : torch::nn::Module {
  DenseImpl(std::int64_t in, std::int64_t out, std::uint64_t seed) {
    weight =
        register_parameter("weight", at::randn({in, out}, at::detail::createCPUGenerator(seed), at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::matmul(x, weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Dense);

at::Tensor numbers(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble);
}
at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

constexpr std::int64_t kWidth = 300;  // activations of some hundred kilobytes: beyond what a ring holds

/// Layers a b c, then a again: the last use is on the first worker.
Layers model() {
  Layers layers;
  const auto a = layers.add<Dense>(kWidth, kWidth, 1);
  const auto kept = a;
  layers.add<Dense>(kWidth, kWidth, 2);
  layers.add<Dense>(kWidth, kWidth, 3);
  layers.again(kept);
  return layers;
}

/// Each process trains its part, then the whole model plainly, and compares.
void train() {
  Session session(WorkerOptions::from_env());
  for (const Schedule schedule : {Schedule::kArrival, Schedule::kGPipe, Schedule::kOneFOneB}) {
    Pipeline pipe(session.worker(), model(),
                  {.balance = {1, 1, 1},
                   .micro_batches = 4,
                   .schedule = schedule,
                   .checkpoint = Checkpoint::kExceptLast});
    std::vector<Dense> plain{Dense(kWidth, kWidth, 1), Dense(kWidth, kWidth, 2), Dense(kWidth, kWidth, 3)};
    for (std::uint64_t step = 0; step < 3; ++step) {
      const std::int64_t rows = 600 + 7 * static_cast<std::int64_t>(step);
      const at::Tensor x = numbers({rows, kWidth}, 10 + step), y = numbers({rows, kWidth}, 20 + step);
      const double loss = pipe.train_step(x, y, mean_square);
      const at::Tensor expected =
          mean_square(plain[0]->forward(plain[2]->forward(plain[1]->forward(plain[0]->forward(x)))), y);
      expected.backward();
      require(std::abs(loss - expected.item<double>()) < 1e-12, fmt::format("the loss of step {}", step));
    }
    const at::Tensor mine = pipe.parameters().at(0).grad();
    const at::Tensor expected = plain[session.rank()]->weight.grad();
    require(at::allclose(mine, expected, 1e-10, 1e-12),
            fmt::format("gradients; apart by {}", (mine - expected).abs().max().item<double>()));
    const at::Tensor x = numbers({5, kWidth}, 99);
    const pipeline::Batch output = pipe.infer(x);
    require((output.size() == 1) == (session.rank() == 0), "the output is on the worker of the last use");
  }
  session.shutdown();
}

TEST(PipelineProcesses, TrainLikeThePlainModel) {
  ProcessWorld world(3);
  world.start_all("train");
  expect_all_end_well(world, seconds(120));
}

/// Ends or stops its process in the second micro-batch of the second step.
struct TreacherousImpl : torch::nn::Module {
  TreacherousImpl(bool given, int with) : treacherous(given), signal(with) {
    weight = register_parameter("weight", at::ones({1}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (treacherous && ++calls == 6) {
      std::ofstream(std::string(std::getenv("TORCHSPAN_RUNTIME_DIR")) + "/struck") << "now";
      raise(signal);
    }
    return x * weight;
  }
  bool treacherous;
  int signal;
  int calls = 0;
  at::Tensor weight;
};
TORCH_MODULE(Treacherous);

/// Trains until a worker is struck; the exit code says whether the error named it.
void be_struck(int signal) {
  Session session(WorkerOptions::from_env());
  session.runtime().log.set_level(LogLevel::kOff);
  const int victim = std::atoi(std::getenv("TEST_VICTIM"));
  Layers layers;
  for (int stage = 0; stage < 3; ++stage) layers.add<Treacherous>(stage == victim, signal);
  PipelineOptions options{.balance = {1, 1, 1}, .micro_batches = 4};
  options.checkpoint = Checkpoint::kNever;
  Pipeline pipe(session.worker(), layers, options);
  const at::Tensor x = at::ones({8, 1}, at::kDouble);
  const auto loss = [](const at::Tensor& output, const at::Tensor&) { return output.mean(); };
  pipe.train_step(x, x, loss);
  try {
    pipe.train_step(x, x, loss);
  } catch (const Error& error) {
    const std::string text = error.what();
    std::fprintf(stderr, "%s\n", text.c_str());
    const bool named = text.find(fmt::format("worker{}", victim)) != std::string::npos &&
                       text.find("step 1") != std::string::npos;
    std::fflush(nullptr);
    _exit(named ? 0 : 3);  // the session cannot end in grace
  }
  throw std::runtime_error("the step went through");
}
void be_killed() { be_struck(SIGKILL); }
void be_stopped() { be_struck(SIGSTOP); }

class Struck : public ::testing::TestWithParam<int> {
 protected:
  /// Starts a world whose victim is struck; returns once it was.
  void strike(ProcessWorld& world, const std::string& scenario) {
    for (int rank = 0; rank < 3; ++rank) {
      world.start(rank, scenario,
                  {{"TEST_VICTIM", std::to_string(GetParam())}, {"TORCHSPAN_RUNTIME_DIR", world.folder()}});
    }
    const Deadline deadline = world.executor().deadline_in(seconds(60));
    while (!std::filesystem::exists(world.folder() + "/struck")) {
      ASSERT_FALSE(deadline.passed(world.executor().now())) << "the victim did not come to its end";
      world.executor().sleep(std::chrono::milliseconds(1));
    }
  }
  void expect_survivors_named_it(ProcessWorld& world, Duration limit) {
    const TimePoint begin = world.executor().now();
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == GetParam()) continue;
      testing::Process& survivor = world.process(static_cast<std::size_t>(rank));
      EXPECT_TRUE(survivor.wait(world.executor(), limit)) << "rank " << rank << " hangs";
      EXPECT_EQ(survivor.exit_code(), 0) << survivor.output();
    }
    EXPECT_LT(world.executor().now() - begin, limit);
  }
};

TEST_P(Struck, AKilledWorkerEndsTheStepWithinASecond) {
  ProcessWorld world(3);
  strike(world, "be_killed");
  expect_survivors_named_it(world, seconds(1));
}

TEST_P(Struck, AStoppedWorkerEndsTheStepForTheOthers) {
  ProcessWorld world(3);
  strike(world, "be_stopped");
  expect_survivors_named_it(world, seconds(10));
  testing::Process& victim = world.process(static_cast<std::size_t>(GetParam()));
  victim.kill(SIGCONT);
  EXPECT_TRUE(victim.wait(world.executor(), seconds(10))) << "the one that was stopped hangs";
}

INSTANTIATE_TEST_SUITE_P(Stages, Struck, ::testing::Values(0, 1, 2));

}  // namespace
}  // namespace torchspan

int main(int argc, char** argv) {
  using namespace torchspan;
  return torchspan::testing::cluster_main(
      argc, argv, {{"train", train}, {"be_killed", be_killed}, {"be_stopped", be_stopped}});
}
