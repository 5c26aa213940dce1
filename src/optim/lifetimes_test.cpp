// Optimizers when contexts, passes, trainers and owners end, fail or die in different orders.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim/distributed_optimizer.h>

#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::optim {

using torchspan::testing::error_of;

/// Steps that take one second of the executor at address `executor` in this process, and change nothing.
struct Slow {
  static constexpr std::string_view kName = "Slow";
  std::uint64_t executor = 0;
  void validate() const {}
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;
};

class SlowRule final : public FunctionalOptimizer {
 public:
  SlowRule(Executor& executor, std::vector<at::Tensor> parameters)
      : FunctionalOptimizer("Slow", std::move(parameters)), executor_(executor) {}

 protected:
  std::string refuse_sparse(const at::Tensor&) const override { return ""; }
  void update(std::size_t, at::Tensor&, const at::Tensor&) override {
    executor_.sleep(std::chrono::seconds(1));
  }

 private:
  Executor& executor_;
};

std::unique_ptr<FunctionalOptimizer> Slow::build(std::vector<at::Tensor> parameters) const {
  return std::make_unique<SlowRule>(*reinterpret_cast<Executor*>(executor), std::move(parameters));
}

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::Slow>
    : torchspan::WireStruct<torchspan::optim::Slow, "test.Slow", &torchspan::optim::Slow::executor> {};

namespace torchspan::optim::lifetimes_test {
namespace {

using autograd::Context;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using testing::ClusterOptions;
using ::testing::HasSubstr;
using testing::SimCluster;

struct TrainedImpl : torch::nn::Module {
  explicit TrainedImpl(double value) {
    weight = register_parameter("weight", torch::full({3}, value, torch::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor value() const { return weight.detach().clone(); }
  at::Tensor weight;
};
TORCH_MODULE(Trained);

at::Tensor value_of(const RRef<Trained>& layer) { return layer.local_value()->value(); }
constexpr Class<Trained, double> kLayer{"Layer"};
constexpr Function<&TrainedImpl::forward> kForward{"Layer.forward"};
constexpr Function<value_of> kValue{"value_of"};

at::Tensor loss_of(const RRef<Trained>& layer, const at::Tensor& x) {
  return layer.rpc_sync(kForward, x).sum();
}
std::int64_t optimizers(Worker& worker) {
  return static_cast<std::int64_t>(worker.extension<OptimExtension>().count());
}
std::int64_t contexts(Worker& worker) {
  return static_cast<std::int64_t>(worker.extension<autograd::AutogradExtension>().counts().contexts);
}
/// x * 2, whose backward fails after `ms`.
at::Tensor failing(Worker& worker, const at::Tensor& x, std::int64_t ms) {
  at::Tensor y = x * 2;
  y.register_hook([&executor = worker.runtime().executor, ms](const at::Tensor& gradient) {
    executor.sleep(milliseconds(ms));
    throw std::runtime_error("a bad hook");
    return gradient;
  });
  return y;
}
constexpr Function<failing> kFailing{"failing"};
constexpr Function<loss_of> kLoss{"loss_of"};
constexpr Function<optimizers> kOptimizers{"optimizers"};
constexpr Function<contexts> kContexts{"contexts"};

at::Tensor input() { return torch::ones({3}, torch::kDouble); }

ClusterOptions world(int workers, std::uint64_t seed) {
  ClusterOptions options;
  options.workers = workers;
  options.seed = seed;
  options.functions.add(kLayer, kForward, kValue, kFailing, kLoss, kOptimizers, kContexts);
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<autograd::AutogradExtension>());
    extensions.push_back(std::make_unique<OptimExtension>(OptimizerTable().add<Slow>()));
    return extensions;
  };
  return options;
}

void on_first(int workers, const std::function<void(Worker&)>& body) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SimCluster(world(workers, seed)).run([&](Worker& worker) {
      if (worker.rank() == 0) body(worker);
    });
  }
}

void await(Worker& worker, int size) {
  for (int i = 0; i < 10'000 && worker.world_size() != size; ++i)
    worker.runtime().executor.sleep(milliseconds(1));
  ASSERT_EQ(worker.world_size(), size);
}

/// The call that computes the loss elsewhere is under way, and the owner does not know the context yet: the
/// request for steps is its first message in any order of messages.
TEST(StepsInBackward, ReachOwnersAheadOfTheForwardPass) {
  on_first(3, [](Worker& worker) {
    const auto layer = worker.remote(1, kLayer, 5.0);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.5}, {layer});
    double expected = 5;
    for (const std::uint32_t place : {2u, 0u, 1u, 2u}) {
      Context context(worker);
      optimizer.step_in_backward(context);
      context.backward(worker.remote(place, kLoss, layer, input()));
      expected -= 0.5;
      EXPECT_TRUE(layer.rpc_sync(kValue).equal(torch::full({3}, expected, torch::kDouble))) << place;
    }
    {
      Context context(worker);  // which its owner knows from the request only
      optimizer.step_in_backward(context);
    }
    worker.runtime().executor.sleep(seconds(1));
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(worker.rpc_sync(rank, kContexts), 0) << rank;
  });
}

/// The step waits for another optimizer's step, which takes a second; meanwhile the pass fails.
TEST(StepsInBackward, DoNotBeginOnceTheirPassHasFailed) {
  on_first(3, [](Worker& worker) {
    Executor& executor = worker.runtime().executor;
    const auto layer = worker.remote(1, kLayer, 5.0);
    DistributedOptimizer mine(worker, SGD{.lr = 0.5}, {layer});
    DistributedOptimizer slow(worker, Slow{reinterpret_cast<std::uint64_t>(&executor)}, {layer});
    Thread other = executor.spawn("other", [&] {
      Context context(worker);
      context.backward(layer.rpc_sync(kForward, input()).sum());
      slow.step(context);
    });
    executor.sleep(milliseconds(300));  // the step is running
    Context context(worker);
    mine.step_in_backward(context);
    const at::Tensor x = input().set_requires_grad(true);
    const at::Tensor loss = (worker.rpc_sync(2, kFailing, x, 100) + layer.rpc_sync(kForward, input())).sum();
    EXPECT_THAT(error_of([&] { context.backward(loss); }).what(), HasSubstr("a bad hook"));
    other.join();
    executor.sleep(seconds(5));
    EXPECT_TRUE(layer.rpc_sync(kValue).equal(torch::full({3}, 5.0, torch::kDouble)));
  });
}

/// A step is running when its pass fails: backward() throws after the step is over.
TEST(StepsInBackward, HaveEndedWhenTheirFailedPassThrows) {
  on_first(3, [](Worker& worker) {
    Executor& executor = worker.runtime().executor;
    const auto layer = worker.remote(1, kLayer, 5.0);
    DistributedOptimizer slow(worker, Slow{reinterpret_cast<std::uint64_t>(&executor)}, {layer});
    Context context(worker);
    slow.step_in_backward(context);
    const at::Tensor x = input().set_requires_grad(true);
    const at::Tensor loss = (worker.rpc_sync(2, kFailing, x, 900) + layer.rpc_sync(kForward, input())).sum();
    const TimePoint before = executor.now();
    EXPECT_THAT(error_of([&] { context.backward(loss); }).what(), HasSubstr("a bad hook"));
    EXPECT_GE(executor.now() - before, seconds(1));
    EXPECT_LT(executor.now() - before, milliseconds(1100));
  });
}

TEST(OptimExtension, ReportAMissingBackward) {
  on_first(3, [](Worker& worker) {
    const auto layer = worker.remote(1, kLayer, 5.0), unused = worker.remote(2, kLayer, 5.0);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.5}, {layer}), other(worker, SGD{.lr = 0.5}, {unused});
    Context context(worker);
    const at::Tensor loss = layer.rpc_sync(kForward, input()).sum();
    const Error error = error_of([&] { optimizer.step(context); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), HasSubstr("call context.backward(loss) before step()"));
    context.backward(loss);
    optimizer.step(context);
    other.step(context);  // without a gradient, but after a pass
    EXPECT_TRUE(layer.rpc_sync(kValue).equal(torch::full({3}, 4.5, torch::kDouble)));
  });
}

/// Trainers of an open world that train a layer of worker 0.
class Trainers : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  Trainers()
      : cluster_([] {
          ClusterOptions options = world(1, GetParam());
          options.open = true;
          return options;
        }()) {}
  void run(std::function<void(Worker&)> body) { cluster_.run(std::move(body)); }
  SimCluster cluster_;
};
INSTANTIATE_TEST_SUITE_P(Seeds, Trainers, ::testing::Range<std::uint64_t>(1, 6));

TEST_P(Trainers, ThatDieLeaveNoOptimizerWithTheOwners) {
  run([&](Worker& worker) {
    Trained kept(1);
    DistributedOptimizer mine(worker, SGD{.lr = 0.5}, {kept});
    for (int incarnation = 0; incarnation < 3; ++incarnation) {
      Thread trainer = cluster_.start(1, incarnation, [&](rpc::WorkerService& service) {
        const auto layer = service.worker().remote(0, kLayer, 5.0);
        DistributedOptimizer optimizer(service.worker(), Adam{}, {layer});
        Context context(service.worker());
        context.backward(layer.rpc_sync(kForward, input()).sum());
        optimizer.step(context);
        cluster_.executor().sleep(seconds(100));
      });
      cluster_.executor().sleep(seconds(1));
      EXPECT_EQ(optimizers(worker), 2);
      cluster_.kill(1);
      cluster_.executor().sleep(seconds(1));
      EXPECT_EQ(optimizers(worker), 1) << "and not the owner's own";
      EXPECT_EQ(worker.debug().references.owners, 0u);
      trainer.join();
    }
  });
}

TEST_P(Trainers, ThatLeaveMayKeepTheirOptimizers) {
  run([&](Worker& worker) {
    Thread trainer = cluster_.start(1, 0, [&](rpc::WorkerService& service) {
      const auto layer = service.worker().remote(0, kLayer, 5.0);
      const DistributedOptimizer optimizer(service.worker(), Adam{}, {layer});
      service.shutdown(cluster_.executor().deadline_in(seconds(60)));
      EXPECT_EQ(optimizer.lr(), Adam{}.lr);
    });
    trainer.join();
    cluster_.executor().sleep(seconds(1));
    EXPECT_EQ(optimizers(worker), 0);
  });
}

/// The destructor used to throw, which ends the process.
TEST_P(Trainers, OutliveTheOwnersOfTheirParameters) {
  run([&](Worker& worker) {
    std::atomic<bool> leave{false};
    Thread owner = cluster_.start(1, 0, [&](rpc::WorkerService& service) {
      while (!leave.load()) cluster_.executor().sleep(milliseconds(1));
      service.shutdown(cluster_.executor().deadline_in(seconds(60)));
    });
    await(worker, 2);
    Trained here(1);
    std::optional<RRef<Trained>> there = worker.remote(1, kLayer, 5.0);
    auto optimizer =
        std::make_unique<DistributedOptimizer>(worker, SGD{.lr = 0.5}, std::vector<Target>{*there, here});
    there.reset();
    leave.store(true);
    owner.join();
    await(worker, 1);
    Context context(worker);
    context.backward(here->forward(input()).sum());
    const Error error = error_of([&] { optimizer->step(context); });
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    EXPECT_THAT(error.what(), HasSubstr("'worker1'"));
    EXPECT_EQ(here->weight[0].item<double>(), 0.5) << "the other owners have stepped";
    optimizer.reset();
    cluster_.executor().sleep(seconds(1));
    EXPECT_EQ(optimizers(worker), 0) << "all present owners have dropped it";
  });
}

/// The message that drops it is lost with the connection, and is resent.
TEST_P(Trainers, EndTheirOptimizersThroughABrokenConnection) {
  run([&](Worker& worker) {
    Thread trainer = cluster_.start(1, 0, [&](rpc::WorkerService& service) {
      const auto layer = service.worker().remote(0, kLayer, 5.0);
      { const DistributedOptimizer optimizer(service.worker(), SGD{.lr = 1}, {layer}); }
      cluster_.network().sever("worker0", "worker1");
      EXPECT_EQ(optimizers(worker), 1);
      cluster_.executor().sleep(seconds(60));
      EXPECT_EQ(optimizers(worker), 0);
      service.shutdown(cluster_.executor().deadline_in(seconds(60)));
    });
    trainer.join();
  });
}

}  // namespace
}  // namespace torchspan::optim::lifetimes_test
