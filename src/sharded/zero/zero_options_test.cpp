// Divided gradients and parameters that arrive during the next forward.
#include <fmt/format.h>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/optimizer.h>
#include <torchspan/sharded.h>

#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::zero_options_test {
namespace {

namespace nn = torch::nn;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::values;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::over_shared_memory;
using torchspan::testing::Rank;

constexpr std::int64_t kWide = 48;  // a weight has 18 KiB: several pages on each rank

struct BlockImpl : nn::Module {
  explicit BlockImpl(double seed) {
    weight = register_parameter("weight", values({kWide, kWide}, seed) * 0.2);
    bias = register_parameter("bias", values({kWide}, seed + 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (at_forward) at_forward();
    return at::tanh(at::linear(x, weight, bias)) + x;
  }
  std::function<void()> at_forward;
  at::Tensor weight, bias;
};
TORCH_MODULE(Block);

/// Three units, and a head of the root.
struct NetImpl : nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(Sharded<Block>(5 * i));
      register_module("block" + std::to_string(i), blocks.back());
    }
    head = register_parameter("head", values({kWide, 2}, 77));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);
    return at::matmul(x, head);
  }
  std::vector<Sharded<Block>> blocks;
  at::Tensor head;
};
TORCH_MODULE(Net);

at::Tensor input(int rank, int step) { return values({3, kWide}, rank * 1.3 + 0.4 * step); }

data_parallel::DataParallelOptions one_bucket_for_each_block() {
  return {.bucket_cap_mb_list = {0.0178}};  // 18662 bytes: a weight has 18432, its bias 384
}

template <class Model>
at::Tensor loss_of(Model& model, int rank, int step) {
  return model(input(rank, step)).pow(2).sum();
}

void expect_equal_parameters(const nn::Module& a, const nn::Module& b) {
  const auto mine = a.named_parameters(), other = b.named_parameters();
  for (const auto& item : mine) EXPECT_TRUE(at::equal(item.value(), other[item.key()])) << item.key();
}

TEST(ZeroOptions, EveryCombinationTrainsAsReplicas) {
  for (const int size : {1, 2, 3}) {
    for (const ZeroOptions options :
         {ZeroOptions{true, false}, ZeroOptions{false, true}, ZeroOptions{true, true}}) {
      SCOPED_TRACE(fmt::format("{} ranks, {}, {}", size, options.divide_gradients, options.overlap_forward));
      on_ranks(size, [&](const Rank& self) {
        Net mine, replica;
        DistributedDataParallel<Net> sharded(mine, self.group, one_bucket_for_each_block()),
            plain(replica, self.group, one_bucket_for_each_block());
        ASSERT_EQ(sharded.stats().bucket_parameters.size(), 4U);
        const optim::OptimizerSpec spec = optim::Adam({.lr = 0.01});
        ZeroRedundancyOptimizer zero(sharded, spec, options);
        optim::Optimizer optimizer(*replica, spec);
        for (int step = 0; step < 4; ++step) {
          if (step == 2) {  // whole gradients of this rank, in memory that was given up
            const auto local = sharded.no_sync();
            loss_of(sharded, self.rank, 9).backward();
            const auto also = plain.no_sync();
            loss_of(plain, self.rank, 9).backward();
          }
          const at::Tensor loss = loss_of(sharded, self.rank, step), wanted = loss_of(plain, self.rank, step);
          EXPECT_TRUE(at::equal(loss, wanted));
          loss.backward();
          wanted.backward();
          zero.step();
          optimizer.step();
          optimizer.zero_grad();
        }
        zero.synchronize();
        expect_equal_parameters(*mine, *replica);
      });
    }
  }
}

TEST(ZeroOptions, DividedGradientsGiveUpTheMemoryOfOtherRanksParts) {
  for (const bool divides : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      Net net;
      DistributedDataParallel<Net> ddp(net, self.group, one_bucket_for_each_block());
      ZeroRedundancyOptimizer zero(ddp, optim::SGD({.lr = 0.1}), {.divide_gradients = divides});
      for (int step = 0; step < 2; ++step) {
        loss_of(ddp, self.rank, step).backward();
        const auto zeros = net->blocks[1]->weight.grad().eq(0).sum().item<std::int64_t>();
        const std::int64_t page = 4096 / sizeof(double);
        if (divides) {
          EXPECT_GE(zeros, page);  // half of the bucket has 2.3 pages, of which at least one is whole
          EXPECT_LE(zeros, kWide * kWide / 2 + page);
        } else {
          EXPECT_EQ(zeros, 0);
        }
        zero.step();
      }
    });
  }
}

// peer: zero test_ddp_zero_overlap*: differs: the next forward overlaps with the gathers, the backward pass with the
//   reductions; every step is exact
TEST(ZeroOptions, EachUnitWaitsForItsParametersOnly) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    DistributedDataParallel<Net> ddp(net, self.group, one_bucket_for_each_block());
    ZeroRedundancyOptimizer zero(ddp, optim::SGD({.lr = 0.1}), {.overlap_forward = true});
    std::vector<std::size_t> arriving;
    for (auto& block : net->blocks) block->at_forward = [&] { arriving.push_back(zero.arriving()); };
    for (int step = 0; step < 3; ++step) {
      arriving.clear();
      loss_of(ddp, self.rank, step).backward();
      if (step == 0) {
        EXPECT_THAT(arriving, ElementsAre(0, 0, 0));
      } else {
        EXPECT_THAT(arriving, ElementsAre(2, 1, 0));  // the forward of the module has waited for the head
      }
      zero.step();
      EXPECT_EQ(zero.arriving(), 4U);
    }
    const at::NoGradGuard no_grad;
    ddp(input(0, 0));
    EXPECT_EQ(zero.arriving(), 0U);
    zero.synchronize();
  });
}

struct TiedImpl : nn::Module {
  TiedImpl() {
    first = register_module("first", Sharded<Block>(1));
    second = register_module("second", Sharded<Block>(2));
    second->weight = second->register_parameter("tied", first->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return first->forward(second->forward(x)); }
  Sharded<Block> first{nullptr}, second{nullptr};
};
TORCH_MODULE(Tied);

TEST(ZeroOptions, TheForwardOfTheModuleWaitsForParametersOfTwoUnits) {
  on_ranks(2, [&](const Rank& self) {
    Tied net;
    DistributedDataParallel<Tied> ddp(net, self.group,
                                      {.bucket_cap_mb_list = {1e-6}, .find_unused_parameters = true});
    ZeroRedundancyOptimizer zero(ddp, optim::SGD({.lr = 0.1}), {.overlap_forward = true});
    loss_of(ddp, self.rank, 0).backward();
    zero.step();
    const std::size_t all = zero.arriving();
    std::size_t left = all;
    net->second->at_forward = [&] { left = zero.arriving(); };
    const at::NoGradGuard no_grad;
    ddp(input(self.rank, 1));
    EXPECT_EQ(all, 4U);   // two weights, of which one is unused, and two biases
    EXPECT_EQ(left, 1U);  // the bias of the first unit, which runs later
    zero.synchronize();
  });
}

TEST(ZeroOptions, StateIsNotSavedWhileParametersArrive) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    DistributedDataParallel<Net> ddp(net, self.group, one_bucket_for_each_block());
    ZeroRedundancyOptimizer zero(ddp, optim::Adam({.lr = 0.01}), {.overlap_forward = true});
    const auto source = zero.state_source();
    loss_of(ddp, self.rank, 0).backward();
    zero.step();
    state::StateWriter refused, writer;
    EXPECT_THAT(error_text([&] { source->save(refused); }), HasSubstr("call synchronize()"));
    EXPECT_TRUE(refused.tensors().empty());
    zero.synchronize();
    EXPECT_EQ(zero.arriving(), 0U);
    source->save(writer);
    EXPECT_FALSE(writer.tensors().empty());
  });
}

TEST(ZeroOptions, BroadcastsAndJoinsWaitForParameters) {
  on_ranks(3, [&](const Rank& self) {
    Net mine, replica;
    DistributedDataParallel<Net> sharded(mine, self.group, one_bucket_for_each_block()),
        plain(replica, self.group, one_bucket_for_each_block());
    const optim::OptimizerSpec spec = optim::Adam({.lr = 0.01});
    ZeroRedundancyOptimizer zero(sharded, spec, {.divide_gradients = true, .overlap_forward = true});
    optim::Optimizer optimizer(*replica, spec);
    sharded.join([&] {
      for (int step = 0; step < 2 + self.rank; ++step) {
        loss_of(sharded, self.rank, step).backward();
        zero.step();
      }
    });
    EXPECT_EQ(zero.arriving(), 0U);
    plain.join([&] {
      for (int step = 0; step < 2 + self.rank; ++step) {
        loss_of(plain, self.rank, step).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
    });
    expect_equal_parameters(*mine, *replica);
  });
}

// peer: zero test_lr_scheduler: same
// peer: zero test_local_optimizer_parity: same: against replicas
TEST(ZeroOptions, SchedulesSetTheRatesOfAllRanks) {
  on_ranks(2, [&](const Rank& self) {
    Net mine, replica;
    DistributedDataParallel<Net> sharded(mine, self.group), plain(replica, self.group);
    const optim::OptimizerSpec spec = optim::SGD({.lr = 0.1, .momentum = 0.9});
    ZeroRedundancyOptimizer zero(sharded, spec, {.overlap_forward = true});
    optim::Optimizer optimizer(*replica, spec);
    const optim::LRLambda schedule = optim::StepLR{.step_size = 2, .gamma = 0.5};
    optim::LRScheduler mine_schedule(zero, schedule), replica_schedule(optimizer, schedule);
    for (int step = 0; step < 5; ++step) {
      loss_of(sharded, self.rank, step).backward();
      loss_of(plain, self.rank, step).backward();
      zero.step();
      optimizer.step();
      optimizer.zero_grad();
      mine_schedule.step();
      replica_schedule.step();
    }
    EXPECT_EQ(zero.lrs(), optimizer.lrs());
    EXPECT_EQ(zero.lrs(), std::vector<double>{0.025});
    zero.synchronize();
    expect_equal_parameters(*mine, *replica);
  });
}

TEST(ZeroOptions, ARankThatDiesAfterItsStepIsNamed) {
  if (over_shared_memory()) GTEST_SKIP() << "ranks do not die there";
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    on_ranks(
        3,
        [&](const Rank& self) {
          Net net;
          DistributedDataParallel<Net> ddp(net, self.group, one_bucket_for_each_block());
          ZeroRedundancyOptimizer zero(ddp, optim::SGD({.lr = 0.1}), {.overlap_forward = true});
          loss_of(ddp, self.rank, 0).backward();
          EXPECT_THAT(error_text([&] {
                        zero.step();
                        if (self.rank == 1) {
                          self.die();
                          throw Error(ErrorKind::kCancelled, "rank 1 died");
                        }
                        loss_of(ddp, self.rank, 1).backward();
                      }),
                      HasSubstr("rank 1 died"));
          if (self.rank == 1) return;
          // Parameters that did not arrive stay an error.
          if (zero.arriving() == 0) return;
          EXPECT_THAT(error_text([&] { zero.synchronize(); }), HasSubstr("rank 1 died"));
          EXPECT_THAT(error_text([&] { loss_of(ddp, self.rank, 2); }), HasSubstr("rank 1 died"));
        },
        seed);
  }
}

TEST(ZeroOptions, DifferentOptionsAreNamedOnAllRanks) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    DistributedDataParallel<Net> ddp(net, self.group);
    EXPECT_THAT(error_text([&] {
                  ZeroRedundancyOptimizer(ddp, optim::SGD({.lr = 0.1}), {.overlap_forward = self.rank == 0});
                }),
                HasSubstr("overlap_forward"));
  });
}

}  // namespace
}  // namespace torchspan::sharded::zero_options_test
