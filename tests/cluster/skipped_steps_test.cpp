// Training over real processes in which one rank throws between forward and backward, and all skip that step: the result is
// that of one process that never saw the batch.
#include <cstdlib>
#include <fmt/format.h>
#include <optional>
#include <string>

#include <torch/torch.h>

#include <torchspan/data_parallel.h>
#include <torchspan/sharded.h>
#include <torchspan/torchspan.h>

#include "tests/support/cluster_main.h"

namespace torchspan::skipped_steps_test {
namespace {

using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::ProcessWorld;
using testing::require;

constexpr std::int64_t kRows = 12, kWidth = 4;
constexpr int kTrainers = 3, kSteps = 6, kSkipped = 2, kParts = 2;
constexpr double kRate = 0.3;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

at::Tensor values(at::IntArrayRef sizes, double seed) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return torch::arange(count, torch::kDouble).mul(0.71).add(seed).sin().reshape(sizes).mul(0.5);
}

struct TableImpl : torch::nn::Module {
  explicit TableImpl(std::int64_t seed)
      : rows(register_parameter("rows", values({kRows, kWidth}, static_cast<double>(seed)))) {}
  at::Tensor forward(const at::Tensor& ids) { return rows.index_select(0, ids); }
  at::Tensor rows;
};
TORCH_MODULE(Table);
constexpr ModuleClass<Table, std::int64_t> kTable{"Table"};

struct DenseImpl : torch::nn::Module {
  DenseImpl()
      : up(register_parameter("up", values({kWidth, kWidth}, 3))),
        down(register_parameter("down", values({kWidth, 1}, 5))),
        seen(register_buffer("seen", at::zeros({1}))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) seen.add_(1);
    return at::tanh(x.matmul(up)).matmul(down);
  }
  at::Tensor up, down, seen;
};
TORCH_MODULE(Dense);

at::Tensor ids_of(int rank, int step, int part) {
  return (torch::arange(3, torch::kLong) * 5 + 7 * rank + 2 * step + part).remainder(kRows);
}
at::Tensor loss_of(const at::Tensor& predicted, int rank, int step) {
  return at::mse_loss(predicted, values({3, 1}, 10 * step + rank)) / kParts;
}

/// The same training in one process, without the skipped step: up, down, and the table's rows.
std::vector<at::Tensor> train_alone() {
  Table table(7);
  Dense dense;
  std::vector<at::Tensor> parameters{dense->up, dense->down, table->rows};
  torch::optim::SGD optimizer(parameters, kRate);
  for (int step = 0; step < kSteps; ++step) {
    if (step == kSkipped) continue;
    optimizer.zero_grad();
    for (int rank = 0; rank < kTrainers; ++rank) {
      for (int part = 0; part < kParts; ++part)
        (loss_of(dense(table(ids_of(rank, step, part))), rank, step) / kTrainers).backward();
    }
    optimizer.step();
  }
  return parameters;
}

/// How the program behaves: "flag" all-reduces a flag after backward, "agree" calls agree() there, "before" calls it between
/// the last forward and backward; in "kept", outputs outlive the exception; in "early", it comes while gradients accumulate.
struct Mode {
  explicit Mode(const std::string& text)
      : flag(text == "flag"), before(text == "before"), kept(text == "kept"), early(text == "early") {}
  bool flag, before, kept, early;
};

template <class Model>
bool all_succeeded(const Mode& mode, Model& model, const collective::Group& group, bool ok) {
  if (!mode.flag) return model.agree(ok);
  return group.all_reduce(at::full({1}, ok ? 1 : 0, at::kInt), collective::kMin).wait().item<int>() != 0;
}

/// Runs a step up to its last backward, on a rank that may throw in it. Returns whether all ranks continue with it.
template <class Model>
bool run_step(const Mode& mode, Model& model, const collective::Group& group, int step,
              const std::function<at::Tensor(int)>& input,
              const std::function<void(const at::Tensor&)>& backward) {
  const TimePoint before = group.backend()->runtime().executor.now();
  const bool throws = step == kSkipped && group.rank() == 1;
  at::Tensor kept;
  std::string failure;
  try {
    {
      const auto local = model.no_sync();
      const at::Tensor output = model(input(0));
      if (mode.early && throws) throw std::runtime_error("not a number");
      backward(loss_of(output, group.rank(), step));
    }
    const at::Tensor output = model(input(1));
    if (mode.kept) kept = output;
    if (throws) throw std::runtime_error("not a number");
    kept = loss_of(output, group.rank(), step);
    if (!mode.before) backward(kept);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  const bool all = all_succeeded(mode, model, group, failure.empty());
  require(all == (step != kSkipped), fmt::format("step {} on rank {}: {}", step, group.rank(), failure));
  if (!all && group.rank() != 1 && !mode.before)
    require(failure.find("rank 1") != std::string::npos, "the rank that threw is named, not: " + failure);
  require(group.backend()->runtime().executor.now() - before < seconds(5), "at once, not: " + failure);
  if (all && mode.before) backward(kept);
  return all;
}

struct Trainers final : rpc::Extension {
  void attach(rpc::Registrar&) override {}
  std::optional<collective::Group> group;
};

std::vector<at::Tensor> train_with_table(Worker& worker, const RRef<Table>& table) {
  const collective::Group& group = worker.extension<Trainers>().group.value();
  const Mode mode(variable("TEST_MODE"));
  const int mine = group.rank();
  Dense dense;
  DistributedDataParallel model(dense, group);
  optim::DistributedOptimizer optimizer(
      worker, {{.targets = {table}, .spec = optim::SGD{.lr = kRate / kTrainers}, .hogwild = true},
               {.targets = {dense}, .spec = optim::SGD{.lr = kRate}}});
  for (int step = 0; step < kSteps; ++step) {
    autograd::Context context(worker);
    const bool all = run_step(
        mode, model, group, step,
        [&](int part) { return table.rpc_sync(kTable.forward(), ids_of(mine, step, part)); },
        [&](const at::Tensor& loss) { context.backward(loss); });
    if (all) optimizer.step(context);
    group.barrier();
  }
  return {dense->up.detach(), dense->down.detach()};
}
constexpr Function<train_with_table> kTrain{"train_with_table"};

void hybrid() {
  FunctionTable functions;
  functions.add(kTable, kTrain);
  std::vector<std::unique_ptr<rpc::Extension>> extensions;
  extensions.push_back(std::make_unique<Trainers>());
  Session session(WorkerOptions::from_env(), functions, std::move(extensions));
  session.run([&](Session& running) {
    if (running.rank() < kTrainers)
      running.worker().extension<Trainers>().group =
          running.group({.ranks = {0, 1, 2}, .timeout = seconds(30)});
    running.worker().barrier();
    if (running.rank() == 0) {
      const RemoteModule table(running.worker(), kTrainers, kTable, std::int64_t{7});
      std::vector<Future<std::vector<at::Tensor>>> trainings;
      for (int rank = 0; rank < kTrainers; ++rank)
        trainings.push_back(running.worker().with({.timeout = seconds(100)}).rpc_async(rank, kTrain, table));
      const std::vector<at::Tensor> expected = train_alone();
      const at::Tensor rows_before = values({kRows, kWidth}, 7);
      for (auto& training : trainings) {
        const std::vector<at::Tensor> dense = training.wait();
        require(at::allclose(dense[0], expected[0], 1e-10, 1e-12), "up");
        require(at::allclose(dense[1], expected[1], 1e-10, 1e-12), "down");
      }
      const at::Tensor rows = table.parameter_rrefs().front().to_here();
      require(at::allclose(rows, expected[2], 1e-10, 1e-12), "the table");
      require(!at::allclose(rows, rows_before), "trained");
    }
  });
}

const std::vector<std::string> kModes{"flag", "agree", "before", "kept", "early"};

TEST(SkippedSteps, OfDataParallelTrainersWithARemoteTable) {
  for (const std::string& mode : kModes) {
    SCOPED_TRACE(mode);
    ProcessWorld world(kTrainers + 1);
    for (int rank = 0; rank <= kTrainers; ++rank)
      world.start(rank, "skipped_steps.hybrid", {{"TEST_MODE", mode}});
    expect_all_end_well(world, seconds(120));
  }
}

const testing::Scenarios kScenarios("skipped_steps", {{"hybrid", hybrid}});

}  // namespace
}  // namespace torchspan::skipped_steps_test
