// Data-parallel training over two hosts, which are network namespaces connected by a virtual cable: shared
// memory inside each, encrypted connections between them.
#include <csignal>
#include <unistd.h>

#include <torch/torch.h>

#include <torchspan/data_parallel.h>
#include <torchspan/torchspan.h>

#include "tests/cluster/hosts_suite.h"
#include "tests/support/errors.h"

namespace torchspan::hosts_training_test {
namespace {

using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::join_on_host;
using testing::Process;
using testing::ProcessWorld;
using testing::require;
using torchspan::testing::error_of;
namespace nn = torch::nn;

constexpr int kRanks = 4;
/// The number of rows of a batch on each rank.
constexpr std::array<std::int64_t, kRanks> kParts{3, 2, 4, 1};
constexpr std::int64_t kRows = 10;

at::Tensor values(at::IntArrayRef sizes, double seed) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::arange(count, at::kDouble).mul(0.61).add(seed).sin().reshape(sizes);
}

/// An ordinary model that does not fit into one message between hosts.
nn::Sequential make_net() {
  nn::Sequential net(nn::Linear(6, 300), nn::BatchNorm1d(300), nn::Tanh(), nn::Linear(300, 300), nn::Tanh(),
                     nn::Linear(300, 2));
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  double seed = 0;
  for (auto& parameter : net->parameters()) parameter.copy_(values(parameter.sizes(), seed += 1) * 0.1);
  return net;
}

collective::GroupOptions over_hosts() { return {.timeout = seconds(60)}; }
data_parallel::DataParallelOptions small_buckets() {
  return {.bucket_cap_mb = 0.1, .first_bucket_mb = 0.001};
}

/// Ten steps on a part of each batch, compared with the same steps of one process on the whole batch.
void train() {
  Session session = join_on_host();
  {
    const int rank = static_cast<int>(session.rank());
    const collective::Group group = session.group(over_hosts());
    require(group.backend()->name().find("hierarchical") != std::string::npos, group.backend()->name());
    nn::Sequential mine = make_net(), whole = make_net();
    require(convert_sync_batch_norm(*mine, group) == 1, "there is one batch norm");
    DistributedDataParallel model(mine, group, small_buckets());
    torch::optim::SGD optimizer(mine->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)),
        oracle(whole->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    const auto* part = kParts.data() + rank;
    const std::int64_t begin = std::accumulate(kParts.data(), part, std::int64_t{0});
    std::vector<double> losses;
    for (int step = 0; step < 10; ++step) {
      const at::Tensor batch = values({kRows, 6}, step);
      optimizer.zero_grad();
      oracle.zero_grad();
      (model.forward(batch.narrow(0, begin, *part)).pow(2).sum() * kRanks / kRows).backward();
      const at::Tensor loss = whole->forward(batch).pow(2).sum() / kRows;
      loss.backward();
      losses.push_back(loss.item<double>());
      optimizer.step();
      oracle.step();
    }
    require(losses.back() < losses.front() / 2, "the model learns something");
    const auto ours = mine->named_parameters(), theirs = whole->named_parameters();
    for (const auto& item : theirs) {
      require(at::allclose(ours[item.key()], item.value(), 1e-10, 1e-10), item.key() + " as in one process");
      const auto gathered = group.all_gather(ours[item.key()].detach().contiguous()).wait();
      for (const at::Tensor& one : gathered) require(at::equal(one, gathered[0]), item.key() + " alike");
    }
    require(model.stats().rebuilt && model.stats().bucket_bytes.size() > 2, "there are several buckets");
  }
  session.shutdown(seconds(30));
}

/// In the third step's backward the victim dies, when some of its gradients have been sent.
void lose_a_rank() {
  const int victim = std::atoi(std::getenv("VICTIM"));
  Session session = join_on_host();
  const bool dies = static_cast<int>(session.rank()) == victim;
  const std::string name = "worker" + std::to_string(victim);
  nn::Sequential net = make_net();
  DistributedDataParallel model(net, session.group(over_hosts()), small_buckets());
  try {
    for (int step = 0; step < 1000; ++step) {
      net->zero_grad();
      if (dies && step == 2) {
        net->parameters()[2].register_hook([](const at::Tensor& gradient) {
          kill(getpid(), SIGKILL);
          return gradient;
        });
      }
      model.forward(values({3, 6}, step)).pow(2).sum().backward();
    }
  } catch (const Error& error) {
    const std::string text = error.what();
    require(error.kind() == ErrorKind::kDisconnected, text);
    require(text.find(name) != std::string::npos, name + " in: " + text);
    require(text.find("in reduction 3") != std::string::npos, "in reduction 3 in: " + text);
    return;
  }
  require(false, "a worker missed " + name);
}

/// Trains until the network is cut, prints "lost", and waits until it is restored: by then the group has
/// ended, and the session reports the same error as the group did.
void lose_the_network() {
  Session session = join_on_host();
  nn::Sequential net = make_net();
  const collective::Group group = session.group(over_hosts());
  DistributedDataParallel model(net, group, small_buckets());
  const auto train_once = [&] {
    net->zero_grad();
    model.forward(values({3, 6}, 1)).pow(2).sum().backward();
  };
  train_once();
  std::printf("ready\n");
  std::fflush(stdout);
  const Error lost = error_of([&] {
    while (true) train_once();
  });
  std::printf("lost: %s\n", lost.what());
  std::fflush(stdout);
  while (access(std::getenv("TEST_MENDED"), F_OK) != 0)
    session.runtime().executor.sleep(std::chrono::milliseconds(10));
  std::vector<Error> errors{lost, error_of(train_once), error_of([&] { group.barrier(); })};
  errors.push_back(error_of([&] { session.shutdown(seconds(30)); }));
  const std::string other = session.rank() == 0 ? "worker1 (rank 1" : "worker0 (rank 0";
  for (const Error& error : errors) {
    const std::string text = error.what();
    require(error.kind() == ErrorKind::kDisconnected, text);
    require(text.find(other) != std::string::npos, other + " in: " + text);
    require(text.find("silent for 5.0 s") != std::string::npos, "silent for 5.0 s in: " + text);
  }
}

class TrainingOverHosts : public testing::Hosts {};

// peer: ddp (documented) training between hosts; a rank that dies in a step: better: the error names the
//   rank, the reduction and the bucket
TEST_F(TrainingOverHosts, IsThatOfOneProcessOnTheWholeBatch) {
  ProcessWorld world(kRanks);
  for (int rank = 0; rank < kRanks; ++rank)
    start(world, rank, rank < 2 ? network_.near : network_.far, "hosts_training.train");
  expect_all_end_well(world);
}

/// Of the two ranks of the far host, rank 2 exchanges data with the near host for both; rank 3 does not. The
/// programs end right after the error. They used to crash there if a continuation of the reducer held the
/// group's last handle.
// peer: ddp (documented) training between hosts
TEST_F(TrainingOverHosts, ThatLosesARankInAStepEndsOnAllOthersWithItsName) {
  for (const int victim : {3, 2}) {
    SCOPED_TRACE(victim);
    ProcessWorld world(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      start(world, rank, rank < 2 ? network_.near : network_.far, "hosts_training.lose_a_rank",
            {{"VICTIM", std::to_string(victim)}});
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      Process& process = world.process(static_cast<std::size_t>(rank));
      ASSERT_TRUE(process.wait(world.executor(), seconds(30))) << "rank " << rank << " still runs";
      EXPECT_EQ(process.exit_code(), rank == victim ? 128 + SIGKILL : 0) << process.output();
    }
  }
}

/// The network is cut for eight seconds: longer than the world waits, shorter than TCP does. From the fifth
/// second on the ranks count each other as dead, and stay so.
TEST_F(TrainingOverHosts, EndsWithTheWorldWhenHostsLoseTheirConnection) {
  ProcessWorld world(2);
  const std::string mended = world.folder() + "/mended";
  for (int rank = 0; rank < 2; ++rank) {
    start(world, rank, rank == 0 ? network_.near : network_.far, "hosts_training.lose_the_network",
          {{"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"TEST_MENDED", mended}});
  }
  for (std::size_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(says(world, world.process(rank), "ready", seconds(60))) << world.process(rank).output();
  }
  const TimePoint pulled = world.executor().now();
  ASSERT_TRUE(network_.pull_cable());
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(says(world, world.process(rank), "lost", seconds(30))) << world.process(rank).output();
    EXPECT_LT(world.executor().now() - pulled, seconds(30)) << world.process(rank).output();
  }
  if (world.executor().now() - pulled < seconds(8)) {
    world.executor().sleep(seconds(8) - (world.executor().now() - pulled));
  }
  ASSERT_TRUE(network_.plug_cable());
  std::ofstream(mended) << "now";
  expect_all_end_well(world);
}

const testing::Scenarios kScenarios("hosts_training", {{"train", train},
                                                       {"lose_a_rank", lose_a_rank},
                                                       {"lose_the_network", lose_the_network}});

}  // namespace
}  // namespace torchspan::hosts_training_test
