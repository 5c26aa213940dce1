// Parts of parameters in memory that the ranks share, and ranks that have none left.
#include <chrono>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/scarce_backend.h"

namespace torchspan::sharded::shared_memory_test {
namespace {

using ::testing::HasSubstr;
using testing::kWidth;
using testing::LayerSpec;
using testing::RandomNet;
using testing::values;
using torchspan::testing::error_of;
using torchspan::testing::on_ranks;
using torchspan::testing::on_shared_memory_ranks;
using torchspan::testing::Rank;
using torchspan::testing::Scarce;

constexpr int kSize = 2;

RandomNet net_of() {
  LayerSpec dense, nest;
  nest.kind = 2, nest.inner_unit = nest.unit = dense.unit = true;
  return RandomNet(std::vector<LayerSpec>{dense, nest, dense});
}

template <class Model, class Step>
void train(Model& model, int rank, const Step& step) {
  for (int i = 0; i < 3; ++i) {
    model(values({3, kWidth}, rank + 0.4 * i), std::vector<std::size_t>{}).pow(2).sum().backward();
    step();
  }
}

/// After the steps of train() on all ranks.
RandomNet trained_alone() {
  RandomNet net = net_of();
  optim::Optimizer sgd(*net, optim::SGD({.lr = 0.05}));
  for (int i = 0; i < 3; ++i) {
    for (int rank = 0; rank < kSize; ++rank) {
      const at::Tensor x = values({3, kWidth}, rank + 0.4 * i);
      (net->forward(x, {}).pow(2).sum() / kSize).backward();
    }
    sgd.step();
    sgd.zero_grad();
  }
  return net;
}

void expect_close(const RandomNet& net, const RandomNet& wanted) {
  const auto expected = wanted->named_parameters();
  for (const auto& item : net->named_parameters())
    EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 1e-10, 1e-12)) << item.key();
}

void train_fully_sharded(const Rank& self, const collective::Group& group, const RandomNet& wanted) {
  for (const std::size_t alone : {std::size_t{1}, std::size_t{1} << 20}) {
    RandomNet net = net_of();
    const std::size_t mapped = alone == 1 ? 1 : 0;
    FullyShardedDataParallel<RandomNet> model(net, group, {.alone_bytes = alone, .mapped_bytes = mapped});
    optim::Optimizer sgd(*net, optim::SGD({.lr = 0.05}));
    train(model, self.rank, [&] {
      sgd.step();
      sgd.zero_grad();
    });
    model.with_full_parameters([&] { expect_close(net, wanted); });
  }
}

void train_zero(const Rank& self, Scarce& scarce, bool has_memory, const RandomNet& wanted) {
  RandomNet net = net_of();
  DistributedDataParallel<RandomNet> model(net, scarce.group);
  if (!has_memory) *scarce.left = 0;
  ZeroRedundancyOptimizer zero(model, optim::SGD({.lr = 0.05}), {.overlap_forward = true});
  *scarce.left = Scarce::kPlenty;  // for broadcasts of buffers
  train(model, self.rank, [&] { zero.step(); });
  zero.synchronize();
  expect_close(net, wanted);
}

TEST(ShardedMemory, ARankWithoutSharedMemoryKeepsItsPartsInItsOwn) {
  const RandomNet wanted = trained_alone();
  for (const bool on_rank_0 : {true, false}) {
    for (const bool on_rank_1 : {true, false}) {
      const auto body = [&](const Rank& self) {
        Scarce scarce(self.group);
        const bool has_memory = self.rank == 0 ? on_rank_0 : on_rank_1;
        train_zero(self, scarce, has_memory, wanted);
        if (!has_memory) *scarce.left = 0;
        train_fully_sharded(self, scarce.group, wanted);
      };
      on_ranks(kSize, body);
    }
  }
}

TEST(ShardedMemory, PartsAreCopiedOnceOrReadInPlace) {
  const RandomNet wanted = trained_alone();
  on_shared_memory_ranks(kSize, [&](const Rank& self) { train_fully_sharded(self, self.group, wanted); });
}

TEST(ShardedMemory, StatisticsSayWhetherPartsAreReadInPlace) {
  on_shared_memory_ranks(kSize, [&](const Rank& self) {
    const at::NoGradGuard no_grad;
    for (const std::size_t mapped : {std::size_t{0}, std::size_t{1}, std::size_t{1} << 20}) {
      FullyShardedDataParallel<RandomNet> model(net_of(), self.group, {.mapped_bytes = mapped});
      model(values({3, kWidth}, 0), std::vector<std::size_t>{});
      EXPECT_EQ(model.stats().mapped_bytes > 0, mapped == 1);
    }
  });
}

/// Returns a view of its parameter.
struct TableImpl : torch::nn::Module {
  TableImpl() { rows = register_parameter("rows", values({7, kWidth}, 3)); }
  at::Tensor forward(std::int64_t count) { return rows.narrow(0, 1, count); }
  at::Tensor rows;
};
TORCH_MODULE(Table);

TEST(ShardedMemory, OutputsOfAForwardOnWholeParametersAreNoViewsOfThem) {
  for (const std::size_t mapped : {std::size_t{0}, std::size_t{1}}) {
    on_shared_memory_ranks(kSize, [&](const Rank& self) {
      const at::NoGradGuard no_grad;
      Table table;
      FullyShardedDataParallel<Table> model(table, self.group, {.mapped_bytes = mapped});
      const at::Tensor wanted = values({7, kWidth}, 3).narrow(0, 1, 3);
      model.with_full_parameters([&] {
        const at::Tensor output = model(std::int64_t{3});
        table->rows.zero_();
        EXPECT_TRUE(at::equal(output, wanted)) << mapped;
      });
    });
  }
}

/// A layer that is late on some ranks, when its parameters are gathered.
struct LateImpl : testing::DenseImpl {
  using DenseImpl::DenseImpl;
  at::Tensor forward(const at::Tensor& x) {
    if (late) late();
    const at::Tensor y = DenseImpl::forward(x);
    if (late && y.requires_grad()) y.register_hook([this](const at::Tensor&) { late(); });
    return y;
  }
  std::function<void()> late;
};
TORCH_MODULE(Late);

TEST(ShardedMemory, PartsDoNotChangeWhileAnotherRankReadsThem) {
  for (const bool reduces : {true, false}) {
    on_shared_memory_ranks(kSize, [&](const Rank& self) {
      Sharded<Late> net(3);
      Late alone(3);
      FullyShardedDataParallel<Sharded<Late>> model(net, self.group, {.mapped_bytes = 1});
      if (self.rank == 1) {  // rank 0 has all elements of so small a unit
        net->late = [&] {
          const Deadline late = self.runtime.executor.deadline_in(std::chrono::milliseconds(5));
          while (!late.passed(self.runtime.executor.now())) self.runtime.executor.yield();
        };
      }
      const auto step_on = [&](int step) {
        const at::AutoGradMode grad_mode(step % 2 == 1);
        const at::Tensor x = values({3, kWidth}, step).set_requires_grad(true),
                         same = x.detach().clone().set_requires_grad(true);
        const at::Tensor y = model(x), wanted = alone->forward(same);
        EXPECT_TRUE(at::equal(y, wanted)) << step;
        if (step % 2 == 1) {
          y.sum().backward();
          wanted.sum().backward();
          EXPECT_TRUE(at::equal(x.grad(), same.grad())) << step;
        }
        const at::NoGradGuard no_grad;
        for (const at::Tensor& part : net->parameters()) part.add_(1);
        for (const at::Tensor& parameter : alone->parameters()) parameter.add_(1);
      };
      for (int step = 0; step < 8; ++step) {
        if (reduces) {
          step_on(step);
        } else {
          const auto local = model.no_sync();
          step_on(step);
        }
      }
    });
  }
}

TEST(ShardedMemory, RanksThatReadDifferentUnitsInPlaceGetAnError) {
  on_shared_memory_ranks(kSize, [&](const Rank& self) {
    const at::NoGradGuard no_grad;
    LayerSpec dense;
    dense.unit = true;
    FullyShardedDataParallel<RandomNet> model(RandomNet(std::vector<LayerSpec>{dense, dense}), self.group,
                                              {.mapped_bytes = 1});
    const std::vector<std::size_t> skipped{static_cast<std::size_t>(self.rank)};
    EXPECT_THAT(error_of([&] {
                  model(values({3, kWidth}, 0), skipped);
                }).what(),
                HasSubstr("must call the same operations"));
  });
}

TEST(ShardedMemory, WholeParametersAreCopiesOfWhichEachRankKeepsItsPart) {
  const auto body = [](const Rank& self) {
    const at::NoGradGuard no_grad;
    RandomNet net = net_of(), alone = net_of();
    FullyShardedDataParallel<RandomNet> model(net, self.group, {.mapped_bytes = 1});
    const at::Tensor x = values({3, kWidth}, 0);
    model.with_full_parameters([&] {
      if (self.rank == 0) {
        EXPECT_TRUE(at::equal(model(x, std::vector<std::size_t>{}), alone->forward(x, {})));
      }
      for (const at::Tensor& parameter : net->parameters()) parameter.add_(1);
    });
    for (const at::Tensor& parameter : alone->parameters()) parameter.add_(1);
    EXPECT_TRUE(at::equal(model(x, std::vector<std::size_t>{}), alone->forward(x, {})));
    model.with_full_parameters([&] { expect_close(net, alone); });
  };
  on_ranks(kSize, body);
  on_shared_memory_ranks(kSize, body);
}

TEST(ShardedMemory, WhenTheGroupHasNoneLeftEveryRankGetsTheError) {
  on_shared_memory_ranks(kSize, [&](const Rank& self) {
    std::vector<collective::Group> others;
    const auto use_up = [&] {
      for (int i = 0; i < 200; ++i) others.push_back(self.group.split(0, self.rank));
    };
    EXPECT_THAT(error_of(use_up).what(), HasSubstr("has no memory for this group"));
    const Error error = error_of([&] { FullyShardedDataParallel<RandomNet> model(net_of(), self.group); });
    EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
    EXPECT_THAT(error.what(), HasSubstr("has no memory for this group"));
    EXPECT_THAT(error.what(), HasSubstr("raise GroupOptions::shared_bytes"));
    others.clear();
    self.group.barrier();
  });
}

}  // namespace
}  // namespace torchspan::sharded::shared_memory_test
