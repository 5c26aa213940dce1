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

struct TableImpl : torch::nn::Module {
  explicit TableImpl(double value) {
    weight = register_parameter("weight", torch::full({4, 3}, value, torch::kDouble));
  }
  at::Tensor forward(const at::Tensor& rows) { return weight.index_select(0, rows); }
  at::Tensor values() const { return weight.detach().clone(); }
  at::Tensor weight;
};
TORCH_MODULE(Table);

constexpr Class<Table, double> kTable{"Table"};
constexpr Function<&TableImpl::forward> kLookUp{"Table.forward"};
constexpr Function<&TableImpl::values> kTableValues{"Table.values"};

constexpr int kTableSteps = 3;

/// What trainers with an Adagrad each compute in turn, in one process. After a restore by others, trainer n has the sums of
/// trainer n, modulo the number of trainers before.
struct AloneTrainers {
  at::Tensor table = torch::full({4, 3}, 0.5, torch::kDouble);
  std::vector<at::Tensor> sums;
  void run(int trainers, int first, int last) {
    const std::vector<at::Tensor> before = sums;
    sums.resize(static_cast<std::size_t>(trainers));
    for (std::size_t n = 0; n < sums.size(); ++n)
      sums[n] = before.empty() ? torch::zeros_like(table) : before[n % before.size()].clone();
    for (int step = first; step < last; ++step) {
      for (int n = 0; n < trainers; ++n) {
        at::Tensor leaf = table.clone().requires_grad_();
        loss_of(leaf.index_select(0, rows_of(n, step)), n).backward();
        at::Tensor& sum = sums[static_cast<std::size_t>(n)];
        sum = sum + leaf.grad().square();
        table = table - 0.1 * leaf.grad() / (sum.sqrt() + 1e-10);
      }
    }
  }
  static at::Tensor rows_of(int trainer, int step) {
    return torch::arange(3, torch::kLong).add(trainer + step).remainder(4);
  }
  static at::Tensor loss_of(const at::Tensor& rows, int trainer) {
    return (rows.square() * (1 + trainer)).sum();
  }
};

/// One trainer of a shared table, with its own Adagrad. They take turns. Continues the newest checkpoint; returns its sums.
at::Tensor train_table(Worker& worker, const RRef<Table>& table, const std::string& folder, int last) {
  std::vector<std::string> names;
  for (int rank = 1; rank < worker.world_size(); ++rank) names.push_back(fmt::format("worker{}", rank));
  optim::DistributedOptimizer optimizer(worker, optim::Adagrad{.lr = 0.1}, {table});
  CheckpointManager manager(worker, {.directory = folder, .participants = names});
  manager.add("table", table);
  manager.add("optimizer", optimizer);
  for (auto step = static_cast<int>(manager.restore_or(0)); step < last;) {
    for (int turn = 1; turn < worker.world_size(); ++turn) {
      if (worker.rank() == turn) {
        autograd::Context context(worker);
        const at::Tensor rows = table.rpc_sync(kLookUp, AloneTrainers::rows_of(turn - 1, step));
        context.backward(AloneTrainers::loss_of(rows, turn - 1));
        optimizer.step(context);
      }
      worker.barrier(names);
    }
    if (++step == last) manager.save(step);
  }
  manager.wait();
  return optimizer.state_dict()["group.0.parameter.0.weight.sum"].clone();
}
constexpr Function<train_table> kTrainTable{"train_table"};

/// Worlds of three, two and four trainers, each of which continues the one before it.
void share_a_table() {
  Session session(WorkerOptions::from_env(), FunctionTable().add(kTable, kLookUp, kTableValues, kTrainTable));
  if (session.rank() == 0) {
    AloneTrainers alone;
    int last = 0;
    for (const int trainers : {3, 2, 4}) {
      alone.run(trainers, last, last + kTableSteps);
      last += kTableSteps;
      if (trainers + 1 == session.world_size()) break;
    }
    Worker& worker = session.worker();
    const RRef<Table> table = worker.remote(0, kTable, last > kTableSteps ? 9.0 : 0.5);
    std::vector<Future<at::Tensor>> results;
    for (int rank = 1; rank < session.world_size(); ++rank)
      results.push_back(worker.rpc_async(rank, kTrainTable, table, variable("TEST_FOLDER"), last));
    for (std::size_t n = 0; n < results.size(); ++n)
      require(at::allclose(results[n].wait(), alone.sums[n], 1e-12, 1e-12), fmt::format("trainer {}", n));
    require(!at::allclose(alone.sums[0], alone.sums[1]), "the trainers' sums differ");
    require(at::allclose(table.rpc_sync(kTableValues), alone.table, 1e-12, 1e-12), "the table");
  }
  session.shutdown();
}

TEST(CheckpointProcesses, GiveTrainersOfASharedTableTheirOwnStateOnAnotherNumberOfTrainersToo) {
  const testing::TemporaryFolder folder;
  for (const int trainers : {3, 2, 4}) {
    ProcessWorld world(trainers + 1);
    for (int rank = 0; rank <= trainers; ++rank)
      world.start(rank, "checkpoint.share_a_table", {{"TEST_FOLDER", folder.path()}});
    expect_all_end_well(world, seconds(60));
  }
}

const testing::Scenarios kScenarios("checkpoint", {{"share_a_table", share_a_table},
                                                   {"train_replicas", train_replicas},
                                                   {"save_with_a_failing_rank", save_with_a_failing_rank}});

}  // namespace
}  // namespace torchspan::checkpoint_test
