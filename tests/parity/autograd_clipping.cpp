// Clipping when some gradients are averaged over replicas and others belong to one trainer. Trainers that
// scaled by their own norms had copies of the averaged parameters that diverged without an error.
#include <torchspan/data_parallel.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/optim/grad_scaler.h>

#include "tests/parity/autograd_world.h"
#include "tests/support/in_process_group.h"

namespace torchspan::autograd_clipping {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using optim::ClipOptions;
using optim::DistributedOptimizer;
using optim::SGD;
using optim::Target;

constexpr int kTrainers = 2, kServer = 2;

struct SharedTableImpl : torch::nn::Module {
  SharedTableImpl() { rows = register_parameter("rows", at::ones({4, 3}, at::kDouble)); }
  at::Tensor forward(const at::Tensor& indices) { return at::embedding(rows, indices); }
  at::Tensor rows;
};
TORCH_MODULE(SharedTable);
constexpr Class<SharedTable> kTable{"Table"};
constexpr Function<&SharedTableImpl::forward> kLookUp{"Table.forward"};

struct ReplicaHead : torch::nn::Module {
  ReplicaHead() { weight = register_parameter("weight", at::linspace(-1, 1, 6, at::kDouble).view({3, 2})); }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::matmul(x, weight)); }
  at::Tensor weight;
};

struct Trainer {
  Worker& worker;
  collective::Group group;
  RRef<SharedTable> table;
  std::shared_ptr<ReplicaHead> head;
  DistributedDataParallel<std::shared_ptr<ReplicaHead>> model;
  /// The batches of the trainers differ, and so do the gradients of their rows.
  void backward(Context& context, int step) {
    const std::int64_t rank = worker.rank();
    const at::Tensor rows = at::full({2}, (rank + step) % 4, at::kLong);
    const at::Tensor scale = at::scalar_tensor(1.0 + 5.0 * static_cast<double>(rank), at::kDouble);
    context.backward((model(table.rpc_sync(kLookUp, rows)) * scale).pow(2).sum());
  }
};

/// Two trainers and a server; `body` runs on the trainers.
void on_trainers(const std::function<void(Trainer&)>& body) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ClusterOptions options = world_of(kTrainers + 1, FunctionTable().add(kTable, kLookUp));
    options.seed = seed;
    options.extensions = [] {
      std::vector<std::unique_ptr<rpc::Extension>> extensions;
      extensions.push_back(std::make_unique<AutogradExtension>());
      extensions.push_back(std::make_unique<optim::OptimExtension>());
      return extensions;
    };
    std::unique_ptr<InProcessWorld> groups;
    SimCluster cluster(std::move(options));
    cluster.run([&](Worker& worker) {
      if (worker.rank() == 0) groups = std::make_unique<InProcessWorld>(cluster.executor(), kTrainers);
      worker.barrier();
      if (worker.rank() != kServer) {
        const auto group = groups->group(static_cast<int>(worker.rank()), worker.runtime());
        const auto head = std::make_shared<ReplicaHead>();
        Trainer trainer{worker, group, worker.remote(kServer, kTable), head,
                        DistributedDataParallel(head, group)};
        try {
          body(trainer);
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
          groups->kill(static_cast<int>(worker.rank()));
        }
      }
      worker.barrier();
      if (worker.rank() == 0) groups.reset();
    });
  }
}

/// Checks that the heads of both trainers have the same bits.
void expect_one_head(Trainer& trainer) {
  const std::vector<at::Tensor> heads =
      trainer.group.all_gather(trainer.head->weight.detach().clone()).wait();
  EXPECT_TRUE(heads[0].equal(heads[1])) << heads[0] << heads[1];
}

TEST(AutogradClipping, RefusesANormOfATrainersOwnForAveragedParameters) {
  on_trainers([](Trainer& trainer) {
    DistributedOptimizer both(trainer.worker, SGD{.lr = 0.1}, {trainer.table, Target(trainer.head)});
    DistributedOptimizer averaged(trainer.worker, SGD{.lr = 0.1}, {Target(trainer.head)});
    DistributedOptimizer own(trainer.worker, SGD{.lr = 0.1}, {trainer.table});
    Context context(trainer.worker);
    trainer.backward(context, 0);
    const Error error = error_of([&] { both.clip_grad_norm(context, 0.01); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("'1.weight'"), HasSubstr("'0.rows'"), HasSubstr("'worker2'"),
                                    HasSubstr("name the replicas")));
    const double norm = averaged.clip_grad_norm(context, 0.01);
    EXPECT_NEAR(norm, context.gradient(trainer.head->weight).norm().item<double>(), 1e-12 * norm);
    EXPECT_GT(own.clip_grad_norm(context, 0.01), 0);
    averaged.step(context);
    own.step(context);
    expect_one_head(trainer);
  });
}

TEST(AutogradClipping, ScalesAllReplicasByTheLargestOfTheirNorms) {
  on_trainers([](Trainer& trainer) {
    DistributedOptimizer optimizer(trainer.worker, SGD{.lr = 0.1}, {trainer.table, Target(trainer.head)});
    for (int step = 0; step < 4; ++step) {
      trainer.group.barrier();
      const at::Tensor before = trainer.head->weight.detach().clone();
      Context context(trainer.worker);
      trainer.backward(context, step);
      const at::Tensor gradient = context.gradient(trainer.head->weight).clone();
      const double alone = optimizer.clip_grad_norm(context, {.max_norm = 0.5, .replicas = {0, 1}});
      const auto norms = trainer.group.all_gather(at::scalar_tensor(alone, at::kDouble).view({1})).wait();
      EXPECT_EQ(norms[0].item<double>(), norms[1].item<double>()) << "one norm for both";
      EXPECT_GE(alone, gradient.norm().item<double>());
      optimizer.step(context);
      EXPECT_TRUE(
          at::allclose(trainer.head->weight, before - gradient * (0.1 * 0.5 / (alone + 1e-6)), 1e-9, 1e-12));
      expect_one_head(trainer);
    }
  });
}

TEST(AutogradClipping, FailsOnAllReplicasWhenTheyDisagreeOrOneHasNoNorm) {
  on_trainers([](Trainer& trainer) {
    DistributedOptimizer optimizer(trainer.worker, SGD{.lr = 0.1}, {trainer.table, Target(trainer.head)});
    const int rank = static_cast<int>(trainer.worker.rank());
    Context context(trainer.worker);
    trainer.backward(context, 0);
    ClipOptions options{.max_norm = 1.0 + rank, .replicas = trainer.group.ranks()};
    expect_error(ErrorKind::kInvalid, "use the same on all replicas",
                 [&] { optimizer.clip_grad_norm(context, options); });
    options.max_norm = 1;
    options.norm_type = rank == 0 ? -1 : 2;  // a type that the owners reject
    const Error error = error_of([&] { optimizer.clip_grad_norm(context, options); });
    EXPECT_THAT(error.what(), HasSubstr("norm_type = -1"));
    if (rank == 1) {
      EXPECT_THAT(error.what(), HasSubstr("replica 'worker0' could not compute its norm"));
    }
    options.norm_type = 2;
    options.replicas = {1 - rank};
    expect_error(ErrorKind::kInvalid, "is not among the replicas",
                 [&] { optimizer.clip_grad_norm(context, options); });
    options.replicas = {rank};
    EXPECT_GT(optimizer.clip_grad_norm(context, options), 0) << "one replica agrees with itself";
    options.replicas = {0, 1};
    options.timeout = seconds(5);
    if (rank == 0) {
      expect_error(ErrorKind::kTimedOut, "worker1", [&] { optimizer.clip_grad_norm(context, options); });
    } else {
      trainer.worker.runtime().executor.sleep(seconds(10));
    }
  });
}

TEST(AutogradClipping, StepsAllReplicasOrNoneWhenOneOfThemHasAnInfiniteGradient) {
  on_trainers([](Trainer& trainer) {
    const int rank = static_cast<int>(trainer.worker.rank());
    // The rows that a trainer looks up get gradients only from it: infinite on rank 1 in the second step.
    DistributedOptimizer optimizer(trainer.worker, SGD{.lr = 0.1}, {trainer.table, Target(trainer.head)});
    optim::GradScaler alone({.init_scale = 4});
    optim::GradScaler together({.init_scale = 4, .growth_interval = 100, .replicas = {0, 1}});
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      trainer.group.barrier();
      const at::Tensor before = trainer.head->weight.detach().clone();
      Context context(trainer.worker);
      const at::Tensor row = trainer.table.rpc_sync(kLookUp, at::full({1}, rank, at::kLong));
      const at::Tensor own = step == 1 && rank == 1 ? row.sum() / 0.0 : row.sum();
      context.backward(together.scale(trainer.model(row.detach()).sum() + own));
      expect_error(ErrorKind::kInvalid, "GradScalerOptions::replicas",
                   [&] { alone.step(optimizer, context); });
      EXPECT_EQ(together.step(optimizer, context), step != 1);
      together.update();
      EXPECT_EQ(together.get_scale(), step == 0 ? 4 : 2);
      EXPECT_EQ(trainer.head->weight.equal(before), step == 1);
      expect_one_head(trainer);
    }
  });
}

}  // namespace
}  // namespace torchspan::autograd_clipping
