#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/checkpoint.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/memory_state.h"
#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::hybrid_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::kWidth;
using testing::LayerSpec;
using testing::MemoryState;
using testing::RandomNet;
using testing::values;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::over_shared_memory;
using torchspan::testing::Rank;

RandomNet net_of() {
  LayerSpec dense, filter;
  filter.kind = 1, filter.unit = dense.unit = true;
  return RandomNet(std::vector<LayerSpec>{dense, filter, dense});
}

at::Tensor input(int rank, int step) { return values({3, kWidth}, rank + 0.4 * step); }

template <class Model>
at::Tensor loss_of(Model& model, int rank, int step) {
  return model(input(rank, step), std::vector<std::size_t>{}).pow(2).sum();
}

// peer: fsdp test_train_parity_hsdp: same
TEST(HybridSharding, CopiesTrainAsOneProcessAndHaveEqualParts) {
  constexpr int kSize = 4;
  for (const int shard_ranks : {1, 2, 4}) {
    RandomNet wanted = net_of();
    optim::Optimizer reference(*wanted, optim::Adam({.lr = 0.01}));
    const auto alone = [&](const at::Tensor& x, const std::vector<std::size_t>& skipped) {
      return wanted->forward(x, skipped);
    };
    for (int step = 0; step < 3; ++step) {
      for (int rank = 0; rank < kSize; ++rank) (loss_of(alone, rank, step) / kSize).backward();
      reference.clip_grad_norm(0.5);
      reference.step();
      reference.zero_grad();
    }
    std::vector<checkpoint::StateWriter> models(kSize), optimizers(kSize);
    on_ranks(kSize, [&](const Rank& self) {
      RandomNet net = net_of();
      FullyShardedDataParallel<RandomNet> model(net, self.group, {.shard_ranks = shard_ranks});
      optim::Optimizer adam(*net, optim::Adam({.lr = 0.01}));
      for (int step = 0; step < 3; ++step) {
        loss_of(model, self.rank, step).backward();
        model.clip_grad_norm(0.5);
        adam.step();
        adam.zero_grad();
      }
      const at::Tensor part = net->head.detach().clone();
      const auto parts = self.group.all_gather(part).wait();
      for (int rank = self.rank % shard_ranks; rank < kSize; rank += shard_ranks)
        EXPECT_TRUE(at::equal(parts[static_cast<std::size_t>(rank)], part)) << rank;
      model.state_source()->save(models[static_cast<std::size_t>(self.rank)]);
      model.optimizer_source(adam)->save(optimizers[static_cast<std::size_t>(self.rank)]);
      model.with_full_parameters([&] {
        const auto expected = wanted->named_parameters();
        for (const auto& item : net->named_parameters())
          EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 1e-10, 1e-12)) << item.key();
      });
      self.group.barrier();
    });
    // Copies save the same parts as replicas; MemoryState fails if these differ.
    const MemoryState model_state(models), optimizer_state(optimizers);
    for (const auto& item : wanted->named_parameters())
      EXPECT_TRUE(at::allclose(model_state.read(item.key()), item.value(), 1e-10, 1e-12)) << item.key();
    for (const auto& entry : reference.state_view())
      EXPECT_TRUE(at::allclose(optimizer_state.read(entry.key()), entry.value(), 1e-9, 1e-12)) << entry.key();
    on_ranks(2, [&](const Rank& self) {
      RandomNet net = net_of();
      FullyShardedDataParallel<RandomNet> model(net, self.group, {.shard_ranks = 1});
      optim::Optimizer adam(*net, optim::Adam({.lr = 0.5}));
      model.state_source()->load(model_state);
      model.optimizer_source(adam)->load(optimizer_state);
      EXPECT_EQ(adam.lr(), 0.01);
      EXPECT_TRUE(at::equal(net->head.detach().view({kWidth, 2}), model_state.read("head")));
    });
  }
}

TEST(HybridSharding, AWrongNumberOfRanksIsAnErrorOnAll) {
  on_ranks(4, [&](const Rank& self) {
    for (const int wrong : {3, -1, 8}) {
      RandomNet net = net_of();
      EXPECT_THAT(
          error_text([&] { FullyShardedDataParallel<RandomNet>(net, self.group, {.shard_ranks = wrong}); }),
          AllOf(HasSubstr("shard_ranks"), HasSubstr("4 ranks")));
    }
    RandomNet net = net_of();
    EXPECT_THAT(error_text([&] {
                  FullyShardedDataParallel<RandomNet>(net, self.group,
                                                      {.shard_ranks = self.rank < 2 ? 2 : 4});
                }),
                HasSubstr("shard_ranks"));
  });
}

TEST(HybridSharding, AnExceptionOnOneRankReachesTheOtherCopies) {
  on_ranks(4, [&](const Rank& self) {
    RandomNet net = net_of();
    FullyShardedDataParallel<RandomNet> model(net, self.group, {.shard_ranks = 2});
    const at::Tensor x = self.rank == 1 ? values({3, kWidth + 1}, 0) : input(self.rank, 0);
    EXPECT_ANY_THROW(model(x, std::vector<std::size_t>{}).sum().backward());
    EXPECT_THAT(error_text([&] { model(input(self.rank, 1), std::vector<std::size_t>{}); }),
                HasSubstr("failed"));
  });
}

TEST(HybridSharding, ARankThatDiesIsNamedOnAllCopies) {
  if (over_shared_memory()) GTEST_SKIP() << "ranks do not die there";
  on_ranks(4, [&](const Rank& self) {
    RandomNet net = net_of();
    FullyShardedDataParallel<RandomNet> model(net, self.group, {.shard_ranks = 2});
    const at::Tensor loss = loss_of(model, self.rank, 0);
    if (self.rank == 3) {
      loss.register_hook([&](const at::Tensor&) { self.die(); });
      EXPECT_ANY_THROW(loss.backward());
      return;
    }
    EXPECT_THAT(error_text([&] { loss.backward(); }), HasSubstr("rank 3"));
  });
}

}  // namespace
}  // namespace torchspan::sharded::hybrid_test
