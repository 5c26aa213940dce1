#include <filesystem>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/autograd.h>
#include <torchspan/checkpoint.h>
#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/checkpoint/extension.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim.h>
#include <torchspan/rpc.h>

#include "checkpoint/remote_values.h"
#include "tests/support/cluster.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::remote_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torchspan::testing::ClusterOptions;
using torchspan::testing::error_of;
using torchspan::testing::SimCluster;
using torchspan::testing::TemporaryFolder;

at::Tensor numbers(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble);
}

struct RemoteDenseImpl : torch::nn::Module {
  explicit RemoteDenseImpl(std::int64_t seed) {
    weight = register_parameter("weight", numbers({4, 4}, static_cast<std::uint64_t>(seed)));
    calls = register_buffer("calls", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    calls += 1;
    return at::tanh(at::matmul(x, weight));
  }
  at::Tensor values() const { return at::cat({weight.detach().flatten(), calls.to(at::kDouble).view({1})}); }
  at::Tensor weight, calls;
};
TORCH_MODULE(RemoteDense);

inline constexpr Class<RemoteDense, std::int64_t> kDense{"RemoteDense"};
inline constexpr Function<&RemoteDenseImpl::forward> kForward{"RemoteDense.forward"};
inline constexpr Function<&RemoteDenseImpl::values> kValues{"RemoteDense.values"};

using Remote = RRef<RemoteDense>;

/// One of the trainers of a table, each with its own optimizer and data: those of trainer n are n times as large. They take
/// turns. Continues the newest checkpoint, or makes one after three steps; returns its sums after `last` steps.
at::Tensor train_shared(Worker& worker, const Remote& table, const std::string& folder, std::int64_t trainers,
                        std::int64_t last) {
  std::vector<std::string> names;
  for (std::int64_t n = 1; n <= trainers; ++n) names.push_back(fmt::format("worker{}", n));
  optim::DistributedOptimizer optimizer(worker, optim::Adagrad{.lr = 0.1}, {table});
  CheckpointManager manager(worker, {.directory = folder, .participants = names});
  manager.add("table", table);
  manager.add("optimizer", optimizer);
  for (std::int64_t step = manager.restore_or(0); step < last;) {
    for (std::int64_t turn = 1; turn <= trainers; ++turn) {
      if (worker.rank() == turn) {
        autograd::Context context(worker);
        const at::Tensor x = numbers({3, 4}, 100 + static_cast<std::uint64_t>(step)) * turn;
        context.backward(table.rpc_sync(kForward, x).square().mean());
        optimizer.step(context);
      }
      worker.barrier(names);
    }
    if (++step == 3) manager.save(step);
  }
  manager.wait();
  return optimizer.state_dict()["group.0.parameter.0.weight.sum"].clone();
}
inline constexpr Function<train_shared> kTrainShared{"train_shared"};

ClusterOptions cluster_of(int workers, std::uint64_t seed) {
  ClusterOptions options;
  options.workers = workers;
  options.seed = seed;
  options.functions.add(kDense, kForward, kValues, kTrainShared);
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> all;
    all.push_back(std::make_unique<autograd::AutogradExtension>());
    all.push_back(std::make_unique<optim::OptimExtension>());
    all.push_back(std::make_unique<CheckpointExtension>());
    return all;
  };
  return options;
}

void train(const Worker& worker, const std::vector<Remote>& layers, optim::DistributedOptimizer& optimizer,
           std::int64_t first, std::int64_t last) {
  for (std::int64_t step = first; step < last; ++step) {
    autograd::Context context(worker);
    at::Tensor x = numbers({3, 4}, 100 + static_cast<std::uint64_t>(step));
    for (const Remote& layer : layers) x = layer.rpc_sync(kForward, x);
    context.backward(x.square().mean());
    optimizer.step(context);
  }
}

std::vector<at::Tensor> values_of(const std::vector<Remote>& layers) {
  std::vector<at::Tensor> values;
  for (const Remote& layer : layers) values.push_back(layer.rpc_sync(kValues));
  return values;
}

TEST(RemoteState, IsWrittenByItsOwnersAndRestoredByOthers) {
  const TemporaryFolder folder;
  std::vector<at::Tensor> expected;
  const auto program = [&](int workers, std::vector<std::string> owners, bool first) {
    SimCluster cluster(cluster_of(workers, static_cast<std::uint64_t>(workers)));
    cluster.run([&](Worker& worker) {
      if (worker.rank() != 0) return;
      std::vector<Remote> layers;
      std::vector<optim::Target> targets;
      for (std::size_t i = 0; i < owners.size(); ++i) {
        layers.push_back(worker.remote(owners[i], kDense, static_cast<std::int64_t>(first ? i : 50 + i)));
        targets.emplace_back(layers.back());
      }
      optim::DistributedOptimizer optimizer(worker, optim::Adam{.lr = 0.05}, targets);
      CheckpointManager manager(worker, {.directory = folder.path(), .participants = {"worker0"}});
      for (std::size_t i = 0; i < layers.size(); ++i) manager.add("layer" + std::to_string(i), layers[i]);
      manager.add("optimizer", optimizer);
      const std::int64_t from = manager.restore_or(0);
      EXPECT_EQ(from, first ? 0 : 3);
      train(worker, layers, optimizer, from, 3);
      if (first) manager.save(3);
      train(worker, layers, optimizer, 3, 6);
      manager.wait();
      if (first) {
        expected = values_of(layers);
        return;
      }
      const auto values = values_of(layers);
      for (std::size_t i = 0; i < values.size(); ++i)
        EXPECT_TRUE(values[i].equal(expected[i])) << "layer " << i;
    });
  };
  program(5, {"worker1", "worker2", "worker3", "worker4"}, true);
  program(3, {"worker2", "worker1", "worker2", "worker1"}, false);
  program(2, {"worker0", "worker1", "worker0", "worker1"}, false);
}

/// Runs train_shared() on each of the trainers; returns their sums, and the values of the table, made from `seed`.
std::vector<at::Tensor> run_trainers(const std::string& folder, std::int64_t trainers, std::int64_t last,
                                     std::int64_t seed) {
  std::vector<at::Tensor> sums;
  SimCluster cluster(cluster_of(static_cast<int>(trainers) + 1, 7));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const Remote table = worker.remote("worker0", kDense, seed);
    std::vector<Future<at::Tensor>> results;
    for (std::int64_t n = 1; n <= trainers; ++n)
      results.push_back(
          worker.rpc_async(fmt::format("worker{}", n), kTrainShared, table, folder, trainers, last));
    for (const auto& result : results) sums.push_back(result.wait());
    sums.push_back(table.rpc_sync(kValues));
  });
  return sums;
}

TEST(RemoteState, OfAnOptimizerOfASharedTableIsThatOfEachTrainer) {
  const TemporaryFolder folder;
  const auto run = [&](std::int64_t trainers, std::int64_t last, std::int64_t seed) {
    return run_trainers(folder.path(), trainers, last, seed);
  };
  const auto saved = run(3, 3, 1);
  EXPECT_FALSE(saved[0].equal(saved[1])) << "this test needs trainers with different sums";
  const auto same = run(3, 3, 2), fewer = run(2, 3, 2), more = run(5, 3, 2), one = run(1, 3, 2);
  for (std::size_t n = 0; n < 3; ++n) {
    EXPECT_TRUE(same[n].equal(saved[n])) << "trainer " << n;
    EXPECT_TRUE(more[n].equal(saved[n])) << "trainer " << n;
    if (n < 2) EXPECT_TRUE(fewer[n].equal(saved[n])) << "trainer " << n;
  }
  EXPECT_TRUE(one[0].equal(saved[0]));
  EXPECT_TRUE(more[3].equal(saved[0]) && more[4].equal(saved[1])) << "new trainers get copies";
  // A run that continues is one that never stopped.
  const auto continued = run(3, 6, 2);
  std::filesystem::remove_all(folder.path());
  const auto whole = run(3, 6, 1);
  for (std::size_t n = 0; n < whole.size(); ++n) EXPECT_TRUE(continued[n].equal(whole[n])) << n;
}

TEST(RemoteState, OfASingleTrainerIsRestoredByAllTrainersOfASharedTable) {
  const TemporaryFolder folder;
  const auto saved = run_trainers(folder.path(), 1, 3, 1), restored = run_trainers(folder.path(), 2, 3, 2);
  EXPECT_TRUE(restored[0].equal(saved[0]));
  EXPECT_TRUE(restored[1].equal(saved[0]));
  EXPECT_TRUE(restored[2].equal(saved[1])) << "the table";
}

TEST(RemoteState, OfSeveralTrainersIsLoadedByTheNameOfOne) {
  const TemporaryFolder folder;
  const auto saved = run_trainers(folder.path(), 2, 3, 1);
  SimCluster cluster(cluster_of(1, 1));
  cluster.run([&](Worker& worker) {
    const Remote table = worker.remote("worker0", kDense, std::int64_t{2});
    optim::DistributedOptimizer optimizer(worker, optim::Adagrad{.lr = 0.1}, {table});
    const Checkpoint checkpoint = Checkpoint::newest(folder.path());
    EXPECT_THAT(error_of([&] { checkpoint.load("optimizer", optimizer); }).what(),
                HasSubstr("'optimizer' was saved by each rank for itself: load the state of one, such as "
                          "'optimizer.rank0'"));
    checkpoint.load("optimizer.rank1", optimizer);
    EXPECT_TRUE(optimizer.state_dict()["group.0.parameter.0.weight.sum"].equal(saved[1]));
  });
}

TEST(RemoteState, IsThatOfTheValueToWhichTheRRefRefersThen) {
  const TemporaryFolder folder;
  SimCluster cluster(cluster_of(3, 1));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    Remote layer = worker.remote("worker1", kDense, std::int64_t{1});
    CheckpointManager manager(worker, {.directory = folder.path(), .participants = {"worker0"}});
    manager.add("layer", layer);
    layer = worker.remote("worker2", kDense, std::int64_t{2});
    manager.save(1);
    manager.wait();
    EXPECT_TRUE(Checkpoint::newest(folder.path()).read("layer.weight").equal(numbers({4, 4}, 2)));
    layer = worker.remote("worker1", kDense, std::int64_t{3});
    EXPECT_EQ(manager.restore(), 1);
    EXPECT_TRUE(layer.rpc_sync(kValues).narrow(0, 0, 16).equal(numbers({4, 4}, 2).flatten()));
  });
}

TEST(RemoteState, OfADeadOwnerIsAnErrorThatNamesIt) {
  const TemporaryFolder folder;
  SimCluster cluster(cluster_of(3, 1));
  cluster.try_services([&](rpc::WorkerService& service) {
    Worker& worker = service.worker();
    worker.runtime().log.set_level(LogLevel::kOff);
    if (worker.rank() != 0) return worker.barrier();
    {
      std::vector<Remote> layers{worker.remote("worker1", kDense, 1), worker.remote("worker2", kDense, 2)};
      CheckpointManager manager(worker, {.directory = folder.path(), .participants = {"worker0"}});
      manager.add("a", layers[0]);
      manager.add("b", layers[1]);
      manager.save(1);
      manager.wait();
      cluster.kill(2);
      EXPECT_THAT(error_of([&] {
                    manager.save(2);
                    manager.wait();
                  }).what(),
                  AllOf(HasSubstr("step 2 was not saved"), HasSubstr("worker2")));
    }
    service.stop("the test is over");
  });
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/step-00000002"));
}

/// A snapshot that is dropped before its owner takes it would stay on the owner.
TEST(RemoteState, HasAllSnapshotsWhenTheFailureOfOneIsThrown) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    ClusterOptions options = cluster_of(3, seed);
    options.network.jitter = std::chrono::milliseconds(10);
    std::vector<const CheckpointExtension*> extensions;
    options.extensions = [&extensions, make = options.extensions] {
      auto all = make();
      extensions.push_back(static_cast<const CheckpointExtension*>(all.back().get()));
      return all;
    };
    SimCluster cluster(std::move(options));
    cluster.run([&](Worker& worker) {
      if (worker.rank() != 0) return;
      const std::vector<Remote> layers{worker.remote("worker1", kDense, std::int64_t{1}),
                                       worker.remote("worker2", kDense, std::int64_t{2})};
      const RemoteValues values{{"a", layers[0].state()}, {"b", layers[1].state()}};
      Owners owners(worker, std::chrono::seconds(60));
      SaveJob job;
      job.listings = {owners.list(values)};
      job.plan = make_plan(job.listings, {"rank 0"});
      for (ListedPart& part : job.listings[0]) {
        if (part.owner == "worker1") part.name += ".gone";
      }
      EXPECT_THAT(error_of([&] { owners.snapshot(values, job, 0); }).what(),
                  HasSubstr("was listed and no longer exists"));
      std::size_t taken = 0;
      for (const CheckpointExtension* one : extensions) taken += one->snapshots();
      EXPECT_EQ(taken, 1u) << "seed " << seed;
    });
  }
}

TEST(RemoteState, NamesWhatCannotBeSaved) {
  const TemporaryFolder folder;
  SimCluster cluster(cluster_of(2, 1));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    RRef<std::string> text(worker, "a text");
    CheckpointManager manager(worker, {.directory = folder.path(), .participants = {"worker0"}});
    manager.add("text", text);
    EXPECT_THAT(error_of([&] { manager.save(1); }).what(),
                AllOf(HasSubstr("'text' is a 'string'"), HasSubstr("RRefs of modules and tensors")));
  });
}

}  // namespace torchspan::checkpoint::remote_test
