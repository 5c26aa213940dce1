// Compares groups, rates, clipping, state and foreign kinds of DistributedOptimizer with the local Optimizer.
// peer: dist_optimizer_test.py (none: groups, rates, clipping, state of a distributed optimizer): more
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/optim/functional.h>

#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::optim::distributed_groups_test {
namespace {

using autograd::Context;
using ::testing::AllOf;
using testing::ClusterOptions;
using ::testing::HasSubstr;
using testing::SimCluster;
using torchspan::testing::error_of;

using TorchAdam = FromTorch<torch::optim::Adam, torch::optim::AdamOptions, "torch.Adam">;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(std::int64_t seed) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    linear = register_module("linear", torch::nn::Linear(3, 3));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(linear(x)); }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> list;
    for (const auto& parameter : parameters()) list.push_back(parameter.detach().clone());
    return list;
  }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Layer);

struct RowsImpl : torch::nn::Module {
  RowsImpl() {
    rows = register_module("rows", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true)));
    at::NoGradGuard no_grad;
    rows->weight.zero_();
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& indices) { return rows(indices); }
  at::Tensor weight() const { return rows->weight.detach().clone(); }
  torch::nn::Embedding rows{nullptr};
};
TORCH_MODULE(Rows);

constexpr Class<Layer, std::int64_t> kLayer{"Layer"};
constexpr Class<Rows> kRows{"Rows"};
constexpr Function<&LayerImpl::forward> kForward{"Layer.forward"};
constexpr Function<&LayerImpl::values> kValues{"Layer.values"};
constexpr Function<&RowsImpl::forward> kLookUp{"Rows.forward"};
constexpr Function<&RowsImpl::weight> kWeight{"Rows.weight"};

void on_first(int workers, const std::function<void(Worker&)>& body) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ClusterOptions options;
    options.workers = workers;
    options.seed = seed;
    options.functions.add(kLayer, kRows, kForward, kValues, kLookUp, kWeight);
    options.extensions = [] {
      std::vector<std::unique_ptr<rpc::Extension>> extensions;
      extensions.push_back(std::make_unique<autograd::AutogradExtension>());
      OptimizerTable table;
      table.add<TorchAdam>();
      extensions.push_back(std::make_unique<OptimExtension>(std::move(table)));
      return extensions;
    };
    SimCluster(options).run([&](Worker& worker) {
      if (worker.rank() == 0) body(worker);
    });
  }
}

at::Tensor input(int step) {
  return torch::linspace(-1, 1, 6, torch::kDouble).view({2, 3}) * (1 + static_cast<double>(step) / 4);
}

void expect_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(actual[i].equal(expected[i])) << "parameter " << i;
}

std::vector<OptimizerSpec> specs() {
  return {SGD{.lr = 0.1, .momentum = 0.9, .nesterov = true},
          Adam{.lr = 0.1, .amsgrad = true},
          AdamW{.lr = 0.1},
          Adagrad{},
          Adadelta{},
          RMSprop{.momentum = 0.9, .centered = true},
          Rprop{},
          Adamax{.foreach = true},
          TorchAdam{torch::optim::AdamOptions(0.1)}};
}

/// Three layers in a row: here, on worker1, on worker2; and the same three in one process.
struct Twins {
  explicit Twins(Worker& worker)
      : first(worker.remote("worker1", kLayer, 1)), second(worker.remote("worker2", kLayer, 2)) {}
  at::Tensor remote_loss(int step) {
    const at::Tensor middle = first.rpc_sync(kForward, here->forward(input(step)));
    return second.rpc_sync(kForward, middle).square().sum();
  }
  void local_pass(int step) {
    local_second->forward(local_first->forward(local_here->forward(input(step)))).square().sum().backward();
  }
  void expect_equal() {
    expect_same(here->values(), local_here->values());
    expect_same(first.rpc_sync(kValues), local_first->values());
    expect_same(second.rpc_sync(kValues), local_second->values());
  }

  Layer here{3}, local_here{3}, local_first{1}, local_second{2};
  RRef<Layer> first, second;
};

// peer: dist_optimizer_test.py `dist_optim` (9 settings: remote weights equal local ones after a step):
//   same, bit for bit over several steps
TEST(DistributedGroups, EveryOptimizerGivesTheBitsOfTheLocalOne) {
  on_first(3, [](Worker& worker) {
    for (const OptimizerSpec& spec : specs()) {
      SCOPED_TRACE(spec.kind);
      Twins twins(worker);
      DistributedOptimizer remote(worker,
                                  {{{twins.first, twins.here}, spec}, {{twins.second}, SGD{.lr = 0.05}}});
      Optimizer one(*twins.local_first, spec), two(*twins.local_here, spec),
          three(*twins.local_second, SGD{.lr = 0.05});
      for (int step = 0; step < 6; ++step) {
        Context context(worker);
        context.backward(twins.remote_loss(step));
        remote.step(context);
        for (Optimizer* local : {&one, &two, &three}) local->zero_grad();
        twins.local_pass(step);
        for (Optimizer* local : {&one, &two, &three}) local->step();
      }
      twins.expect_equal();
    }
  });
}

TEST(DistributedGroups, RatesAndSchedulesActOnAllOwners) {
  on_first(3, [](Worker& worker) {
    Twins twins(worker);
    const auto schedule =
        WarmupLR{.total_iters = 2, .start_factor = 0.5, .then = CosineAnnealingLR{.t_max = 4}};
    DistributedOptimizer remote(
        worker, {{{twins.first, twins.here}, Adam{.lr = 0.1}}, {{twins.second}, SGD{.lr = 0.05}}});
    Optimizer local({ParamGroup(twins.local_first->parameters(), Adam{.lr = 0.1}),
                     ParamGroup(twins.local_here->parameters(), Adam{.lr = 0.1}),
                     ParamGroup(twins.local_second->parameters(), SGD{.lr = 0.05})});
    LRScheduler remote_schedule(remote, schedule), local_schedule(local, schedule);
    for (int step = 0; step < 6; ++step) {
      Context context(worker);
      context.backward(twins.remote_loss(step));
      remote.step(context);
      remote_schedule.step();
      local.zero_grad();
      twins.local_pass(step);
      local.step();
      local_schedule.step();
    }
    twins.expect_equal();
    EXPECT_EQ(remote.lr(1), local.lr(2));
    EXPECT_THAT(error_of([&] { remote.set_lr(1, -1); }).what(), HasSubstr("SGD: lr = -1"));
  });
}

TEST(DistributedGroups, ClipTheNormOfAllOwnersTogether) {
  on_first(3, [](Worker& worker) {
    Twins twins(worker);
    DistributedOptimizer remote(worker, SGD{.lr = 0.5}, {twins.first, twins.here, twins.second});
    std::vector<at::Tensor> all;
    for (auto* layer : {&twins.local_first, &twins.local_here, &twins.local_second}) {
      for (const auto& parameter : (*layer)->parameters()) all.push_back(parameter);
    }
    Optimizer local(all, SGD{.lr = 0.5});
    for (int step = 0; step < 4; ++step) {
      const double limit = step == 3 ? 100 : 0.1, type = step == 1 ? double(INFINITY) : 2;
      local.zero_grad();
      twins.local_pass(step);
      const double expected = local.clip_grad_norm(limit, type);
      local.step();
      Context context(worker);
      context.backward(twins.remote_loss(step));
      EXPECT_NEAR(remote.clip_grad_norm(context, limit, type), expected, 1e-12);
      remote.step(context);
    }
    const auto close = [](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
      for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 1e-12, 1e-12));
    };
    close(twins.here->values(), twins.local_here->values());
    close(twins.first.rpc_sync(kValues), twins.local_first->values());
    close(twins.second.rpc_sync(kValues), twins.local_second->values());
  });
}

TEST(DistributedGroups, GoOnFromAStateThatWasGatheredOrKeptOnItsOwners) {
  on_first(3, [](Worker& worker) {
    for (const OptimizerSpec& spec : specs()) {
      for (const bool gathered : {true, false}) {
        SCOPED_TRACE(spec.kind + (gathered ? ", gathered" : ", kept"));
        Twins twins(worker);
        const std::vector<DistributedParamGroup> groups = {{{twins.first, twins.here}, spec},
                                                           {{twins.second}, spec}};
        Optimizer one(*twins.local_first, spec), two(*twins.local_here, spec),
            three(*twins.local_second, spec);
        auto before = std::make_unique<DistributedOptimizer>(worker, groups);
        for (int step = 0; step < 6; ++step) {
          if (step == 3) {
            auto after = std::make_unique<DistributedOptimizer>(worker, groups);
            before->set_lr(0, 0.03);
            one.set_lr(0.03);
            two.set_lr(0.03);
            if (gathered) {
              after->load_state_dict(before->state_dict());
            } else {
              after->load_state_shards(before->state_shards());
            }
            EXPECT_EQ(after->lr(0), 0.03);
            before = std::move(after);
          }
          Context context(worker);
          context.backward(twins.remote_loss(step));
          before->step(context);
          for (Optimizer* local : {&one, &two, &three}) local->zero_grad();
          twins.local_pass(step);
          for (Optimizer* local : {&one, &two, &three}) local->step();
        }
        twins.expect_equal();
      }
    }
  });
}

TEST(DistributedGroups, RefuseAStateOfOtherTargetsNamingWhatDoesNotFit) {
  on_first(3, [](Worker& worker) {
    Twins twins(worker);
    DistributedOptimizer all(worker, Adam{}, {twins.first, twins.here, twins.second});
    DistributedOptimizer some(worker, Adam{}, {twins.first});
    EXPECT_THAT(error_of([&] { some.load_state_dict(all.state_dict()); }).what(),
                HasSubstr("'group.0.parameter.1.linear"));
    EXPECT_THAT(error_of([&] { all.load_state_dict(some.state_dict()); }).what(),
                AllOf(HasSubstr("failed on 2 of 3 workers"), HasSubstr("worker 'worker2'"),
                      HasSubstr("'2.linear.weight'")));
    EXPECT_THAT(error_of([&] { all.load_state_shards(some.state_shards()); }).what(),
                HasSubstr("no shard is on worker 'worker0'"));
  });
}

TEST(DistributedGroups, NeverApplyAGradientOfAnEarlierContext) {
  on_first(3, [](Worker& worker) {
    for (const OptimizerSpec& spec :
         {OptimizerSpec(SGD{.lr = 0.1}), OptimizerSpec(TorchAdam{torch::optim::AdamOptions(0.1)})}) {
      Twins twins(worker);
      DistributedOptimizer optimizer(worker, spec, {twins.first, twins.second});
      {
        Context context(worker);
        context.backward(twins.remote_loss(0));
        optimizer.step(context);
      }
      const auto untouched = twins.second.rpc_sync(kValues), touched = twins.first.rpc_sync(kValues);
      Context context(worker);
      context.backward(twins.first.rpc_sync(kForward, input(1)).sum());
      optimizer.step(context);
      expect_same(twins.second.rpc_sync(kValues), untouched);
      EXPECT_FALSE(twins.first.rpc_sync(kValues)[0].equal(touched[0]));
    }
  });
}

TEST(DistributedGroups, LoseNoStepOfEightTrainersOnOneTable) {
  constexpr int kSteps = 5;
  on_first(2, [](Worker& worker) {
    auto rows = worker.remote("worker1", kRows);
    std::vector<Thread> trainers;
    for (int trainer = 0; trainer < 8; ++trainer) {
      trainers.push_back(worker.runtime().executor.spawn("trainer", [&worker, rows, trainer] {
        DistributedOptimizer optimizer(worker, SGD{.lr = 1}, {rows});
        for (int step = 0; step < kSteps; ++step) {
          Context context(worker);
          const at::Tensor indices = torch::tensor({trainer % 5, step % 5, 0}, torch::kLong);
          context.backward(rows.rpc_sync(kLookUp, indices).sum());
          optimizer.step(context);
        }
      }));
    }
    trainers.clear();
    at::Tensor expected = torch::zeros({5, 2}, torch::kDouble);
    for (int trainer = 0; trainer < 8; ++trainer) {
      for (int step = 0; step < kSteps; ++step) {
        for (const int row : {trainer % 5, step % 5, 0}) expected[row] -= 1;
      }
    }
    EXPECT_TRUE(rows.rpc_sync(kWeight).equal(expected));
  });
}

TEST(DistributedGroups, StepInBackwardWithTheBitsOfStepsAfterwards) {
  on_first(3, [](Worker& worker) {
    Twins twins(worker), others(worker);
    const std::vector<Target> targets = {twins.here, twins.first, twins.second};
    DistributedOptimizer during(worker, Adam{.lr = 0.1}, targets);
    DistributedOptimizer after(worker, Adam{.lr = 0.1}, {others.here, others.first, others.second});
    for (int step = 0; step < 4; ++step) {
      during.set_lr(0.1 + step);
      after.set_lr(0.1 + step);
      {
        Context context(worker);
        const at::Tensor loss = twins.remote_loss(step);
        during.step_in_backward(context);
        context.backward(loss);
        EXPECT_TRUE(context.gradients().empty());
        during.step(context);  // nothing is left to do
      }
      Context context(worker);
      context.backward(others.remote_loss(step));
      after.step(context);
    }
    expect_same(twins.here->values(), others.here->values());
    expect_same(twins.first.rpc_sync(kValues), others.first.rpc_sync(kValues));
    expect_same(twins.second.rpc_sync(kValues), others.second.rpc_sync(kValues));
  });
}

TEST(DistributedGroups, EachPassOfAContextStepsInBackwardWithTheRatesOfItsOwnCall) {
  on_first(2, [](Worker& worker) {
    auto layer = worker.remote("worker1", kLayer, 1);
    DistributedOptimizer optimizer(worker, SGD{.lr = 1}, {layer}), other(worker, SGD{.lr = 1}, {layer});
    {
      Context context(worker);
      for (const double lr : {0.5, 0.0, 0.25}) {
        const auto before = layer.rpc_sync(kValues);
        const at::Tensor loss = layer.rpc_sync(kForward, input(1)).sum();
        optimizer.set_lr(lr);
        optimizer.step_in_backward(context);
        context.backward(loss);
        EXPECT_EQ(layer.rpc_sync(kValues)[0].equal(before[0]), lr == 0) << lr;
      }
      EXPECT_THAT(
          error_of([&] { other.step_in_backward(context); }).what(),
          AllOf(HasSubstr("two optimizers"), HasSubstr("'0.linear.weight'"), HasSubstr("another context")));
    }
    Context another(worker);
    other.step_in_backward(another);
  });
}

TEST(DistributedGroups, AStepInBackwardThatFailsEndsThePassWithItsParameter) {
  on_first(2, [](Worker& worker) {
    auto rows = worker.remote("worker1", kRows);
    DistributedOptimizer optimizer(worker, Adam{}, {rows});
    Context context(worker);
    const at::Tensor loss = rows.rpc_sync(kLookUp, torch::tensor({1}, torch::kLong)).sum();
    optimizer.step_in_backward(context);
    EXPECT_THAT(error_of([&] { context.backward(loss); }).what(),
                AllOf(HasSubstr("worker1"), HasSubstr("'0.rows.weight'"), HasSubstr("sparse gradient")));
    EXPECT_TRUE(rows.rpc_sync(kWeight).equal(torch::zeros({5, 2}, torch::kDouble)));
  });
}

TEST(DistributedGroups, PassesWhoseParametersWereSteppedMeanwhileFailUnlessTheyAreHogwild) {
  for (const bool hogwild : {false, true}) {
    SCOPED_TRACE(hogwild ? "hogwild" : "by default");
    on_first(2, [hogwild](Worker& worker) {
      auto layer = worker.remote("worker1", kLayer, 1);
      const std::vector<DistributedParamGroup> groups = {{{layer}, SGD{.lr = 1}, hogwild}};
      DistributedOptimizer mine(worker, groups), others(worker, groups);
      const auto pass = [&] { return layer.rpc_sync(kForward, input(1)).sum(); };
      const at::Tensor before = layer.rpc_sync(kValues)[0];
      Context context(worker);
      const at::Tensor x = input(1).set_requires_grad(true);
      const at::Tensor loss = layer.rpc_sync(kForward, x).sum();
      worker.runtime().executor.spawn("other", [&] {
        Context other(worker);
        other.backward(pass());
        others.step(other);
      });
      const at::Tensor after = layer.rpc_sync(kValues)[0];
      EXPECT_FALSE(after.equal(before));
      if (!hogwild) {
        EXPECT_THAT(error_of([&] { context.backward(loss); }).what(), HasSubstr("modified by an inplace"));
        return;
      }
      context.backward(loss);
      Layer twin(1);
      const at::Tensor output = twin->forward(input(1)).detach();
      EXPECT_TRUE(at::allclose(context.gradient(x), (1 - output * output).mm(after), 1e-12, 1e-12));
      mine.step(context);
      EXPECT_FALSE(layer.rpc_sync(kValues)[0].equal(after));
    });
  }
}

TEST(DistributedGroups, AreHogwildOnlyWithSupportedRules) {
  on_first(2, [](Worker& worker) {
    auto layer = worker.remote("worker1", kLayer, 1);
    const TorchAdam wrapped{torch::optim::AdamOptions(0.1)};
    EXPECT_THAT(error_of([&] {
                  DistributedOptimizer(worker, std::vector<DistributedParamGroup>{{{layer}, wrapped, true}});
                }).what(),
                AllOf(HasSubstr("torch.Adam"), HasSubstr("hogwild = false")));
  });
}

TEST(DistributedGroups, RefuseAParameterOfTwoGroupsAndAGroupWithoutTargets) {
  on_first(2, [](Worker& worker) {
    auto layer = worker.remote("worker1", kLayer, 1);
    EXPECT_THAT(error_of([&] {
                  DistributedOptimizer(worker, {{{layer}, SGD{.lr = 1}}, {{layer}, Adam{}}});
                }).what(),
                AllOf(HasSubstr("'0.linear.weight'"), HasSubstr("of group 1 is in group 0 too")));
    EXPECT_THAT(error_of([&] {
                  DistributedOptimizer(worker, {{{layer}, SGD{.lr = 1}}, {{}, Adam{}}});
                }).what(),
                HasSubstr("group 1 of a DistributedOptimizer has no targets"));
  });
}

}  // namespace
}  // namespace torchspan::optim::distributed_groups_test
