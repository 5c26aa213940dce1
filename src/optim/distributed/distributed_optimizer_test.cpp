#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim/distributed_optimizer.h>

#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::optim::distributed_optimizer_test {
namespace {

using autograd::Context;
using ::testing::AllOf;
using testing::ClusterOptions;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::SimCluster;
using torchspan::testing::error_of;

/// Two layers of which forward() uses one.
struct HalfImpl : torch::nn::Module {
  explicit HalfImpl(std::int64_t seed) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    used = register_module("used", torch::nn::Linear(3, 3));
    unused = register_module("unused", torch::nn::Linear(3, 3));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(used(x)); }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> list;
    for (const auto& parameter : parameters()) list.push_back(parameter.detach().clone());
    return list;
  }
  torch::nn::Linear used{nullptr}, unused{nullptr};
};
TORCH_MODULE(Half);

struct TableImpl : torch::nn::Module {
  TableImpl() {
    rows = register_module("rows", torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)));
  }
  at::Tensor forward(const at::Tensor& indices) { return rows(indices); }
  torch::nn::Embedding rows{nullptr};
};
TORCH_MODULE(Table);

struct EmptyImpl : torch::nn::Module {};
TORCH_MODULE(Empty);

std::int64_t optimizers(Worker& worker) {
  return static_cast<std::int64_t>(worker.extension<OptimExtension>().count());
}
at::Tensor scaled(const RRef<at::Tensor>& factor, const at::Tensor& x) { return x * factor.local_value(); }
at::Tensor make_factor(double value) {
  if (value == 0) throw std::runtime_error("a factor of nothing");
  return torch::full({1}, value, torch::kDouble).set_requires_grad(true);
}
at::Tensor make_constant(double value) { return torch::full({1}, value, torch::kDouble); }
std::int64_t a_number() { return 7; }

constexpr Class<Half, std::int64_t> kHalf{"Half"};
constexpr Class<Table> kTable{"Table"};
constexpr Class<Empty> kEmpty{"Empty"};
constexpr Function<&HalfImpl::forward> kForward{"Half.forward"};
constexpr Function<&HalfImpl::values> kValues{"Half.values"};
constexpr Function<&TableImpl::forward> kLookUp{"Table.forward"};
constexpr Function<optimizers> kOptimizers{"optimizers"};
constexpr Function<scaled> kScaled{"scaled"};
constexpr Function<make_factor> kMakeFactor{"make_factor"};
constexpr Function<make_constant> kMakeConstant{"make_constant"};
constexpr Function<a_number> kNumber{"a_number"};

/// Runs `body` on the first of `workers` workers, with several seeds.
void on_first(int workers, const std::function<void(Worker&)>& body) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ClusterOptions options;
    options.workers = workers;
    options.seed = seed;
    options.functions.add(kHalf, kTable, kEmpty, kForward, kValues, kLookUp, kOptimizers, kScaled,
                          kMakeFactor, kMakeConstant, kNumber);
    options.extensions = [] {
      std::vector<std::unique_ptr<rpc::Extension>> extensions;
      extensions.push_back(std::make_unique<autograd::AutogradExtension>());
      extensions.push_back(std::make_unique<OptimExtension>());
      return extensions;
    };
    SimCluster(options).run([&](Worker& worker) {
      if (worker.rank() == 0) body(worker);
    });
  }
}

void expect_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-12, 1e-12)) << "parameter " << i;
  }
}

/// Messages without a waiting sender drop optimizers.
void expect_no_optimizer_left(Worker& worker) {
  worker.runtime().executor.sleep(std::chrono::seconds(1));
  for (const WorkerInfo& info : worker.workers())
    EXPECT_EQ(worker.rpc_sync(info, kOptimizers), 0) << info.name;
}

at::Tensor input() { return torch::linspace(-1, 1, 6, torch::kDouble).view({2, 3}); }

// peer: dist_optimizer_test.py dist_optim
TEST(DistributedOptimizer, WarnsOfTargetsThatAreNeverTrained) {
  on_first(2, [](Worker& worker) {
    const auto trained = worker.remote("worker1", kMakeFactor, 2.0);
    const auto frozen = worker.remote("worker1", kMakeConstant, 2.0);
    ::testing::internal::CaptureStderr();
    const DistributedOptimizer optimizer(worker, SGD{.lr = 0.1}, {trained, frozen});
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(log, AllOf(HasSubstr("worker1"), HasSubstr("requires no gradient"),
                           HasSubstr("requires_grad_(true)"), HasSubstr("target 1 of group 0")));
    EXPECT_THAT(log, Not(HasSubstr("target 0 of")));
  });
}

TEST(DistributedOptimizer, StepsModulesAndTensorsOfAllOwnersAsOneProcessWould) {
  on_first(3, [](Worker& worker) {
    Half first(1), local(2);
    at::Tensor own = make_factor(0.5), factor = make_factor(2);
    std::vector<at::Tensor> parameters = first->parameters();
    for (auto& parameter : local->parameters()) parameters.push_back(parameter);
    parameters.insert(parameters.end(), {own, factor});
    torch::optim::SGD oracle(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));

    auto remote_first = worker.remote("worker1", kHalf, 1);
    auto remote_factor = worker.remote("worker2", kMakeFactor, 2.0);
    Half here(2);
    const at::Tensor own_here = make_factor(0.5);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.1, .momentum = 0.9},
                                   {remote_first, here, own_here, remote_factor});
    for (int step = 0; step < 4; ++step) {
      oracle.zero_grad();
      (factor * local->forward(first->forward(input())) * own).sum().backward();
      oracle.step();
      Context context(worker);
      const at::Tensor hidden = here->forward(remote_first.rpc_sync(kForward, input()));
      context.backward((remote_factor.rpc_sync(kScaled, hidden) * own_here).sum());
      optimizer.step(context);
    }
    expect_equal(remote_first.rpc_sync(kValues), first->values());
    expect_equal(here->values(), local->values());
    expect_equal({own_here, remote_factor.to_here()}, {own, factor});
    EXPECT_FALSE(here->used->weight.grad().defined());
  });
}

// peer: dist_optimizer_test.py dist_optim_none_grads
TEST(DistributedOptimizer, DoesNotContactOwnersThatTookNoPart) {
  on_first(3, [](Worker& worker) {
    auto used = worker.remote("worker1", kHalf, 1), unused = worker.remote("worker2", kHalf, 2);
    const auto before_used = used.rpc_sync(kValues), before_unused = unused.rpc_sync(kValues);
    DistributedOptimizer optimizer(worker, Adagrad{.weight_decay = 0.1}, {used, unused});
    Context context(worker);
    context.backward(used.rpc_sync(kForward, input()).sum());
    optimizer.step(context);
    expect_equal(unused.rpc_sync(kValues), before_unused);
    EXPECT_FALSE(used.rpc_sync(kValues)[0].equal(before_used[0]));
    EXPECT_TRUE(used.rpc_sync(kValues)[2].equal(before_used[2])) << "the unused layer has no gradient";
  });
}

TEST(DistributedOptimizer, RefusesAContextThatHasEnded) {
  on_first(2, [](Worker& worker) {
    const auto half = worker.remote(1, kHalf, 1);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.1}, {half});
    Context context(worker);
    context.backward(half.rpc_sync(kForward, input()).sum());
    context.release();
    const auto expect_refusal = [](const char* verb, const std::function<void()>& use) {
      const Error error = error_of(use);
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.what(), AllOf(HasSubstr(verb), HasSubstr("which has ended")));
    };
    expect_refusal("step()", [&] { optimizer.step(context); });
    expect_refusal("step_in_backward()", [&] { optimizer.step_in_backward(context); });
    expect_refusal("clip_grad_norm()", [&] { optimizer.clip_grad_norm(context, 1); });
  });
}

TEST(DistributedOptimizer, StepsASharedWeightOnce) {
  on_first(1, [](Worker& worker) {
    Half here(1);
    const at::Tensor before = here->used->weight.detach().clone();
    here->register_parameter("again", here->used->weight);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.5}, {here});
    Context context(worker);
    context.backward(here->used->weight.sum());
    optimizer.step(context);
    expect_equal({here->used->weight}, {before - 0.5});
  });
}

// peer: dist_optimizer_test.py dist_optim_exception_on_constructor: better: reports all failures, not only
//   the last
TEST(DistributedOptimizer, ListsTheFailuresOfAllOwnersAndLeavesNothingBehind) {
  on_first(3, [](Worker& worker) {
    Half here(1);
    auto empty = worker.remote("worker1", kEmpty);
    auto number = worker.remote("worker2", kNumber);
    const Error error = error_of([&] {
      DistributedOptimizer(worker, SGD{.lr = 0.1}, {here, empty, number});
    });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("failed on 2 of 3 workers"), HasSubstr("worker 'worker1'"),
                                    HasSubstr("has no parameters"), HasSubstr("worker 'worker2'"),
                                    HasSubstr("'int64', which is neither a module nor a tensor")));
    expect_no_optimizer_left(worker);
  });
}

TEST(DistributedOptimizer, RefusesAParameterThatTwoTargetsName) {
  on_first(2, [](Worker& worker) {
    auto half = worker.remote("worker1", kHalf, 1);
    const Error error = error_of([&] { DistributedOptimizer(worker, SGD{.lr = 0.1}, {half, half}); });
    EXPECT_EQ(error.worker(), "worker1");
    EXPECT_THAT(error.what(),
                HasSubstr("parameter 4 (shape [3, 3], Double) is the same tensor as parameter 0"));
  });
}

TEST(DistributedOptimizer, ReportsTheCreationThatItsTargetFailed) {
  on_first(2, [](Worker& worker) {
    auto failed = worker.remote("worker1", kMakeFactor, 0.0);
    const Error error = error_of([&] { DistributedOptimizer(worker, SGD{.lr = 0.1}, {failed}); });
    EXPECT_THAT(error.what(), HasSubstr("a factor of nothing"));
    expect_no_optimizer_left(worker);
  });
}

// peer: dist_optimizer_test.py dist_optim_exception: better: reports all failures, not only the last
TEST(DistributedOptimizer, CollectsTheFailuresOfAStepAndStepsTheOthers) {
  on_first(3, [](Worker& worker) {
    const at::Tensor own = make_factor(1);
    auto first = worker.remote("worker1", kTable), second = worker.remote("worker2", kTable);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.1, .weight_decay = 0.5}, {own, first, second});
    const at::Tensor indices = torch::tensor({1, 3}, torch::kLong);
    Context context(worker);
    const at::Tensor looked_up = first.rpc_sync(kLookUp, indices) + second.rpc_sync(kLookUp, indices);
    context.backward(looked_up.sum().to(torch::kDouble) + own.sum());
    const Error error = error_of([&] { optimizer.step(context); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("worker 'worker1'"), HasSubstr("worker 'worker2'"), HasSubstr("parameter 0"),
                      HasSubstr("weight_decay = 0.5"), Not(HasSubstr("worker 'worker0'"))));
    EXPECT_NEAR(own.item<double>(), 1 - 0.1 * (1 + 0.5), 1e-12);
  });
}

TEST(DistributedOptimizer, KeepsEveryStepOfTwoOptimizersThatShareAParameter) {
  on_first(3, [](Worker& worker) {
    constexpr int kSteps = 8;
    auto shared = worker.remote("worker1", kMakeFactor, 100.0);
    std::vector<Thread> threads;
    for (int trainer = 0; trainer < 2; ++trainer) {
      threads.push_back(worker.runtime().executor.spawn("trainer", [&worker, shared] {
        DistributedOptimizer optimizer(worker, SGD{.lr = 0.25}, {shared});
        for (int step = 0; step < kSteps; ++step) {
          Context context(worker);
          context.backward(shared.rpc_sync(kScaled, torch::ones({1}, torch::kDouble)).sum());
          optimizer.step(context);
        }
      }));
    }
    threads.clear();
    EXPECT_EQ(shared.to_here().item<double>(), 100 - 2 * kSteps * 0.25);
    expect_no_optimizer_left(worker);
  });
}

TEST(DistributedOptimizer, EndsOnItsOwnersToo) {
  on_first(2, [](Worker& worker) {
    {
      auto half = worker.remote("worker1", kHalf, 1);
      DistributedOptimizer optimizer(worker, SGD{.lr = 0.1}, {half});
      EXPECT_EQ(worker.rpc_sync("worker1", kOptimizers), 1);
    }
    expect_no_optimizer_left(worker);
  });
}

}  // namespace
}  // namespace torchspan::optim::distributed_optimizer_test
