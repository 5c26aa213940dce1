#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/autograd.h>
#include <torchspan/checkpoint.h>
#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/checkpoint/extension.h>
#include <torchspan/optim.h>
#include <torchspan/rpc.h>

#include "checkpoint/remote/owners.h"
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

ClusterOptions cluster_of(int workers, std::uint64_t seed) {
  ClusterOptions options;
  options.workers = workers;
  options.seed = seed;
  options.functions.add(kDense, kForward, kValues);
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> all;
    all.push_back(std::make_unique<autograd::AutogradExtension>());
    all.push_back(std::make_unique<optim::OptimExtension>());
    all.push_back(std::make_unique<CheckpointExtension>());
    return all;
  };
  return options;
}

using Remote = RRef<RemoteDense>;

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
