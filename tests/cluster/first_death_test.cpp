// A process is killed inside each kind of communication. Survivors end because of it, one after the other, and each of
// them, also the one that only sees another survivor end, names the process that died first.
#include <cstdlib>
#include <fmt/format.h>
#include <functional>
#include <optional>

#include <torch/torch.h>

#include <torchspan/data_parallel.h>
#include <torchspan/sharded.h>
#include <torchspan/torchspan.h>

#include "tests/support/cluster_main.h"

namespace torchspan::first_death_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::ProcessWorld;

constexpr int kVictim = 1;
constexpr std::int64_t kWidth = 6, kDeathStep = 2;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::int64_t forward_to_victim(Worker& worker, bool dies);
constexpr Function<forward_to_victim> kForward{"forward_to_victim"};
std::int64_t forward_to_victim(Worker& worker, bool dies) {
  if (worker.rank() != kVictim) return worker.rpc_sync(kVictim, kForward, dies) + 1;
  if (dies) ::kill(getpid(), SIGKILL);
  return 1;
}

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(std::int64_t seed)
      : weight(register_parameter(
            "weight", at::arange(kWidth * kWidth, at::kDouble).add(seed).sin().view({kWidth, kWidth}))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(x.matmul(weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Layer);

torch::nn::Sequential make_net() { return torch::nn::Sequential(Layer(1), Layer(2)); }
at::Tensor input() { return at::ones({2, kWidth}, at::kDouble); }
at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

/// The steps of a rank, and where in one of them the victim dies.
class Ranks {
 public:
  explicit Ranks(Session& session) : session_(session), late_(std::atoi(variable("TEST_LATE").c_str())) {}

  void run(const std::function<void(std::int64_t)>& step) {
    for (std::int64_t i = 0; i < 100; ++i) step(i);
    throw std::runtime_error("the death of rank 1 was not noticed");
  }
  /// Kills the victim; the late rank goes on when another survivor has ended because of that.
  void reach(std::int64_t step) {
    if (step != kDeathStep) return;
    if (session_.rank() == kVictim) ::kill(getpid(), SIGKILL);
    if (session_.rank() != late_) return;
    const auto& backend = session_.worker().backend();
    const Deadline limit = session_.runtime().executor.deadline_in(seconds(20));
    while (backend->is_present(static_cast<std::uint32_t>(2 - late_))) {
      if (limit.passed(session_.runtime().executor.now()))
        throw std::runtime_error("the other survivor did not end");
      session_.runtime().executor.sleep(milliseconds(5));
    }
  }

 private:
  Session& session_;
  const int late_;
};

void calls(Session& session, Ranks& ranks) {
  // Rank 2's handler calls the victim, so that rank 0 knows of it from the answer only.
  ranks.run([&](std::int64_t step) {
    if (session.rank() == 0) session.worker().rpc_sync(2, kForward, step == kDeathStep);
    session.worker().barrier();
  });
}

void barriers(Session& session, Ranks& ranks) {
  ranks.run([&](std::int64_t step) {
    ranks.reach(step);
    session.worker().barrier();
  });
}

void group_of(collective::BackendKind backend, Session& session, Ranks& ranks) {
  const auto group = session.group({.backend = backend});
  ranks.run([&](std::int64_t step) {
    ranks.reach(step);
    group.all_reduce(input()).wait();
  });
}

void messages(Session& session, Ranks& ranks) {
  const auto group = session.group();
  const int next = (session.rank() + 1) % 3;
  ranks.run([&](std::int64_t step) {
    const auto sent = group.send(input(), next);
    ranks.reach(step);
    at::Tensor received = input();
    group.recv(received, collective::kAnySource).wait();
    sent.wait();
  });
}

void data_parallel(Session& session, Ranks& ranks) {
  DistributedDataParallel<torch::nn::Sequential> model(make_net(), session.group());
  ZeroRedundancyOptimizer optimizer(model, optim::SGD{.lr = 0.1});
  ranks.run([&](std::int64_t step) {
    optimizer.zero_grad();
    const at::Tensor loss = model(input()).sum();
    ranks.reach(step);
    loss.backward();
    optimizer.step();
  });
}

void sharded(Session& session, Ranks& ranks) {
  FullyShardedDataParallel<torch::nn::Sequential> model(make_net(), session.group());
  optim::Optimizer optimizer(*model.module(), optim::SGD{.lr = 0.1});
  ranks.run([&](std::int64_t step) {
    optimizer.zero_grad();
    ranks.reach(step);
    model(input()).sum().backward();
    optimizer.step();
  });
}

void pipelines(Session& session, Ranks& ranks) {
  pipeline::Layers layers;
  for (std::int64_t i = 0; i < 3; ++i) layers.add<Layer>(i);
  pipeline::Pipeline pipe(session.worker(), layers, {.balance = {1, 1, 1}, .micro_batches = 2});
  ranks.run([&](std::int64_t step) {
    ranks.reach(step);
    pipe.train_step(input(), input(), mean_square);
  });
}

void checkpoints(Session& session, Ranks& ranks) {
  auto net = make_net();
  CheckpointManager manager(session, {.directory = variable("TEST_FOLDER")});
  manager.add("model", *net);
  ranks.run([&](std::int64_t step) {
    ranks.reach(step);
    manager.save(step + 1);
    manager.wait();
  });
}

using Kind = void (*)(Session&, Ranks&);
const std::map<std::string, Kind>& kinds() {
  using collective::BackendKind;
  static const std::map<std::string, Kind> all{
      {"calls", calls},
      {"barriers", barriers},
      {"shared_memory",
       [](Session& session, Ranks& ranks) { group_of(BackendKind::kSharedMemory, session, ranks); }},
      {"network", [](Session& session, Ranks& ranks) { group_of(BackendKind::kNetwork, session, ranks); }},
      {"gloo", [](Session& session, Ranks& ranks) { group_of(BackendKind::kC10d, session, ranks); }},
      {"messages", messages},
      {"data_parallel", data_parallel},
      {"sharded", sharded},
      {"pipelines", pipelines},
      {"checkpoints", checkpoints}};
  return all;
}

void run() {
  Session session(WorkerOptions::from_env(), FunctionTable().add(kForward));
  Ranks ranks(session);
  kinds().at(variable("TEST_KIND"))(session, ranks);
}

class FirstDeath : public ::testing::TestWithParam<std::string> {};

TEST_P(FirstDeath, IsNamedByEachSurvivor) {
  for (const int late : {0, 2}) {
    if (GetParam() == "calls" && late != 0) continue;  // rank 0 hears of it from rank 2
    const testing::TemporaryFolder folder;
    ProcessWorld world(3);
    for (int rank = 0; rank < 3; ++rank) {
      world.start(
          rank, "first_death.run",
          {{"TEST_KIND", GetParam()}, {"TEST_LATE", std::to_string(late)}, {"TEST_FOLDER", folder.path()}});
    }
    for (const int rank : {0, 2}) {
      EXPECT_TRUE(world.process(rank).wait(world.executor(), seconds(60)))
          << "rank " << rank << " still runs";
      const std::string output = world.process(rank).output();
      const std::string error = output.substr(output.rfind('\n', output.size() - 2) + 1);
      EXPECT_EQ(world.process(rank).exit_code(), 1) << output;
      EXPECT_THAT(error, HasSubstr("worker1 (rank 1"))
          << "rank " << rank << ", rank " << late << " is late:\n"
          << output;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, FirstDeath, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& [name, kind] : kinds()) names.push_back(name);
                           return names;
                         }()),
                         [](const auto& kind) { return kind.param; });

const testing::Scenarios kScenarios("first_death", {{"run", run}});

}  // namespace
}  // namespace torchspan::first_death_test
