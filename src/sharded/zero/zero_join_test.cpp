// ZeroRedundancyOptimizer inside join() when a step is skipped, a reduction fails, or a loop ends with an exception.
#include <cstdint>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>
#include <stdexcept>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::zero_join_test {
namespace {

namespace nn = torch::nn;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::values;
using torchspan::testing::error_text;
using torchspan::testing::invalid_text;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

struct NetImpl : nn::Module {
  NetImpl() {
    weight = register_parameter("weight", values({4, 3}, 1));
    bias = register_parameter("bias", values({3}, 2));
  }
  at::Tensor forward(const at::Tensor& x, bool throws) {
    if (throws) throw std::runtime_error("no such word");
    return at::tanh(at::matmul(x, weight) + bias).pow(2).sum();
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(Net);

using Model = DistributedDataParallel<Net>;

at::Tensor input(int rank, int step) { return values({2, 4}, rank + 0.4 * step); }

/// What an optimizer does after the backward pass of each batch; the optimizers of the two classes do the same.
template <class Optimizer>
void train(Model& model, Optimizer& optimizer, const Rank& self, bool clips) {
  model.join([&] {
    for (int i = 0; i < 1 + self.rank; ++i) {
      try {
        model(input(self.rank, i), /*throws=*/i == 1 && self.rank == 2).backward();
      } catch (const std::exception& error) {
        EXPECT_EQ(i, 1) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("no such word"));
        optimizer.zero_grad();
        continue;
      }
      if (clips) optimizer.clip_grad_norm(100);
      // Step 2 is skipped, as after a loss that is not finite.
      if (i != 2) optimizer.step();
      optimizer.zero_grad();
    }
  });
}

void expect_equal_parameters(const nn::Module& a, const nn::Module& b) {
  const auto mine = a.named_parameters(), other = b.named_parameters();
  for (const auto& item : mine) EXPECT_TRUE(at::equal(item.value(), other[item.key()])) << item.key();
}

TEST(ZeroJoin, RanksWithoutBatchesFollowFailedReductionsAndSkippedSteps) {
  for (const bool clips : {false, true}) {
    on_ranks(4, [&](const Rank& self) {
      Net mine, replica;
      Model sharded(mine, self.group), plain(replica, self.group);
      const optim::OptimizerSpec spec = optim::Adam({.lr = 0.01});
      ZeroRedundancyOptimizer zero(sharded, spec);
      optim::Optimizer optimizer(*replica, spec);
      train(sharded, zero, self, clips);
      train(plain, optimizer, self, clips);
      expect_equal_parameters(*mine, *replica);
    });
  }
}

TEST(ZeroJoin, RanksWithoutBatchesStepAtTheLearningRateOfTheOthers) {
  for (const int group_count : {1, 2}) {
    on_ranks(3, [&](const Rank& self) {
      Net mine, replica;
      Model sharded(mine, self.group), plain(replica, self.group);
      const auto groups_of = [&](Net& net) {
        std::vector<optim::ParamGroup> groups;
        if (group_count == 1) groups.emplace_back(*net, optim::SGD({.lr = 0.1}));
        if (group_count == 2) {
          groups.emplace_back(std::vector<at::Tensor>{net->weight}, optim::SGD({.lr = 0.1}));
          groups.emplace_back(std::vector<at::Tensor>{net->bias}, optim::Adam({.lr = 0.02}));
        }
        return groups;
      };
      ZeroRedundancyOptimizer zero(sharded, groups_of(mine));
      optim::Optimizer optimizer(groups_of(replica));
      const auto train_at_rates = [&](Model& model, auto& trained) {
        model.join([&] {
          for (int i = 0; i < 1 + 2 * self.rank; ++i) {
            trained.set_lr(0.3 / (i + 1));  // a schedule that is called after each batch
            model(input(self.rank, i), false).backward();
            trained.step();
            trained.zero_grad();
          }
        });
      };
      train_at_rates(sharded, zero);
      train_at_rates(plain, optimizer);
      expect_equal_parameters(*mine, *replica);
      EXPECT_EQ(zero.lrs().back(), 0.3 / 5) << "that of the last step";
    });
  }
}

TEST(ZeroJoin, DifferentLearningRatesAreRefusedOnAllRanksBeforeAnythingChanges) {
  on_ranks(2, [](const Rank& self) {
    Net net;
    Model model(net, self.group);
    ZeroRedundancyOptimizer zero(model, optim::SGD({.lr = 0.1}));
    const at::Tensor before = net->weight.detach().clone();
    model(input(self.rank, 0), false).backward();
    if (self.rank == 1) zero.set_lr(0.5);
    EXPECT_THAT(invalid_text([&] { zero.step(); }), HasSubstr("learning rates from 0.1 to 0.5 in group 0"));
    EXPECT_TRUE(at::equal(net->weight, before));
    zero.set_lr(0.2);
    zero.step();
    EXPECT_FALSE(at::equal(net->weight, before));
  });
}

/// Where a program clears gradients in a loop whose step may throw.
enum class Clears : std::uint8_t { kBefore, kBeforeAndOnFailure, kAfterAndOnFailure };

// In join(), the rank that threw takes part in that step's reduction when its next forward begins, after it has cleared.
TEST(ZeroJoin, AnExceptionBetweenForwardAndBackwardOnOneRankSkipsThatStepAsWithoutZero) {
  for (const bool joins : {false, true}) {
    for (const Clears clears : {Clears::kBefore, Clears::kBeforeAndOnFailure, Clears::kAfterAndOnFailure}) {
      on_ranks(3, [&](const Rank& self) {
        SCOPED_TRACE(::testing::Message() << "joins " << joins << ", clears " << static_cast<int>(clears));
        Net mine, replica;
        Model sharded(mine, self.group), plain(replica, self.group);
        const optim::OptimizerSpec spec = optim::SGD({.lr = 0.1, .momentum = 0.9});
        ZeroRedundancyOptimizer zero(sharded, spec);
        optim::Optimizer optimizer(*replica, spec);
        const auto train_on = [&](Model& model, auto& trained) {
          std::string failures;
          const auto loop = [&] {
            for (int step = 0; step < (joins ? 4 + self.rank : 5); ++step) {
              try {
                if (clears != Clears::kAfterAndOnFailure) trained.zero_grad();
                const at::Tensor loss = model(input(self.rank, step), false);
                if (step == 1 && self.rank == 1) throw std::runtime_error("no such sample");
                loss.backward();
                trained.step();
                if (clears == Clears::kAfterAndOnFailure) trained.zero_grad();
              } catch (const std::exception& error) {
                failures += std::to_string(step) + " ";
                if (clears != Clears::kBefore) trained.zero_grad();
              }
            }
          };
          joins ? model.join(loop) : loop();
          return failures;
        };
        const std::string with = train_on(sharded, zero), without = train_on(plain, optimizer);
        EXPECT_EQ(with, "1 ") << "rank " << self.rank;
        EXPECT_EQ(with, without) << "rank " << self.rank;
        expect_equal_parameters(*mine, *replica);
      });
    }
  }
}

TEST(ZeroJoin, AFailedReductionIsNotStepped) {
  on_ranks(2, [](const Rank& self) {
    Net net;
    Model model(net, self.group);
    ZeroRedundancyOptimizer zero(model, optim::SGD({.lr = 0.1}));
    const at::Tensor before = net->weight.detach().clone();
    EXPECT_THAT(error_text([&] {
                  try {
                    model(input(self.rank, 0), self.rank == 1).backward();
                  } catch (const std::runtime_error& error) {
                    throw Error(ErrorKind::kInvalid, error.what());
                  }
                }),
                HasSubstr("no such word"));
    EXPECT_THAT(error_text([&] { zero.step(); }), HasSubstr("step() without averaged gradients"));
    EXPECT_TRUE(at::equal(net->weight, before));
    zero.zero_grad();
    model(input(self.rank, 1), false).backward();
    zero.step();
    EXPECT_FALSE(at::equal(net->weight, before));
  });
}

TEST(ZeroJoin, ALoopThatThrowsBeforeTheStepEndsTheJoinOnAllRanks) {
  for (const int failing : {1, 2}) {
    on_ranks(3, [&](const Rank& self) {
      Net net;
      Model model(net, self.group);
      ZeroRedundancyOptimizer zero(model, optim::SGD({.lr = 0.1}));
      std::string text;
      try {
        model.join([&] {
          for (int i = 0; i < (self.rank == 0 ? 1 : 3); ++i) {
            model(input(self.rank, i), false).backward();
            if (i == 1 && self.rank == failing) throw std::runtime_error("the disk is full");
            zero.step();
          }
        });
      } catch (const std::exception& error) {
        text = error.what();
      }
      EXPECT_THAT(text, HasSubstr("the disk is full"));
      EXPECT_THAT(text, AnyOf(HasSubstr("left join() after a backward pass and before step()"),
                              ::testing::StrEq("the disk is full")));
    });
  }
}

/// The documented loop, of 1 batch on rank 0, 2 on rank 1 and so on. `clears_late`: after the forward.
template <class Optimizer>
void train_with_skips(Model& model, Optimizer& optimizer, const Rank& self, const std::set<int>& skipped,
                      bool clears_late) {
  model.join([&] {
    for (int i = 0; i < 1 + self.rank; ++i) {
      if (!clears_late) optimizer.zero_grad();
      const at::Tensor loss = model(input(self.rank, i), false);
      if (clears_late) optimizer.zero_grad();
      loss.backward();
      if (!skipped.contains(i)) optimizer.step();
    }
  });
}

void expect_skips_like_a_replica(int size, const std::set<int>& skipped, bool clears_late) {
  on_ranks(size, [&](const Rank& self) {
    Net mine, replica;
    Model sharded(mine, self.group), plain(replica, self.group);
    const optim::OptimizerSpec spec = optim::Adam({.lr = 0.01});
    ZeroRedundancyOptimizer zero(sharded, spec);
    optim::Optimizer optimizer(*replica, spec);
    train_with_skips(sharded, zero, self, skipped, clears_late);
    train_with_skips(plain, optimizer, self, skipped, clears_late);
    expect_equal_parameters(*mine, *replica);
    EXPECT_THAT(error_text([&] { zero.step(); }), HasSubstr("step() without averaged gradients"));
    sharded(input(self.rank, 7), false).backward();
    zero.step();
  });
}

/// Step 0: no rank is without batches. 1: rank 0 is, and the loop of rank 1 ends. 2: the loop of the last rank ends.
TEST(ZeroJoin, AStepMayBeSkippedAtTheLastBatchOfARank) {
  for (const std::set<int>& skipped :
       {std::set<int>{0}, std::set<int>{1}, std::set<int>{2}, std::set<int>{0, 1, 2}}) {
    SCOPED_TRACE(::testing::PrintToString(skipped));
    expect_skips_like_a_replica(3, skipped, /*clears_late=*/false);
  }
}

TEST(ZeroJoin, GradientsMayBeClearedAfterTheForwardWhileNoRankFollows) {
  expect_skips_like_a_replica(2, {0}, /*clears_late=*/true);
}

TEST(ZeroJoin, AForwardOrReductionBeforeASkippedStepIsClearedIsAnErrorWhileRanksFollow) {
  on_ranks(2, [](const Rank& self) {
    Net net;
    Model model(net, self.group);
    ZeroRedundancyOptimizer zero(model, optim::SGD({.lr = 0.1}));
    const auto loss_of = [&](int step) { return model(input(self.rank, step), false); };
    model.join([&] {
      loss_of(0).backward();
      zero.step();
      if (self.rank == 0) return;
      loss_of(1).backward();
      EXPECT_THAT(invalid_text([&] { loss_of(2); }), HasSubstr("ranks without batches wait for one of them"));
      zero.zero_grad();
      const at::Tensor first = loss_of(2), second = loss_of(3);
      first.backward();
      EXPECT_THAT(invalid_text([&] { second.backward(); }),
                  HasSubstr("ranks without batches wait for one of them"));
      const at::Tensor before = net->weight.detach().clone();
      zero.step();
      EXPECT_FALSE(at::equal(net->weight, before));
      loss_of(4).backward();
      zero.step();
    });
  });
}

TEST(ZeroJoin, AStepThatFailsBeforeTheUpdateMayBeRepeated) {
  on_ranks(3, [](const Rank& self) {
    Net mine, replica;
    Model sharded(mine, self.group), plain(replica, self.group);
    ZeroRedundancyOptimizer zero(sharded, optim::SGD({.lr = 0.1}));
    optim::Optimizer optimizer(*replica, optim::SGD({.lr = 0.1}));
    const int batches = self.rank == 0 ? 1 : 2;
    sharded.join([&] {
      for (int i = 0; i < batches; ++i) {
        sharded(input(self.rank, i), false).backward();
        if (i == 1) {
          const at::Tensor kept = mine->weight.grad();
          if (self.rank == 2) mine->weight.mutable_grad() = kept.t().contiguous().t();
          EXPECT_THAT(invalid_text([&] { zero.step(); }), HasSubstr("'weight' must be dense and contiguous"));
          mine->weight.mutable_grad() = kept;
        }
        zero.step();
      }
    });
    plain.join([&] {
      for (int i = 0; i < batches; ++i) {
        plain(input(self.rank, i), false).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
    });
    expect_equal_parameters(*mine, *replica);
  });
}

TEST(ZeroJoin, DifferentCallsOnRanksWithBatchesAreAnErrorOnBoth) {
  on_ranks(3, [](const Rank& self) {
    Net net;
    Model model(net, self.group);
    ZeroRedundancyOptimizer zero(model, optim::SGD({.lr = 0.1}));
    model.join([&] {
      for (int i = 0; i < (self.rank == 0 ? 1 : 3); ++i) {
        model(input(self.rank, i), false).backward();
        if (i == 1) {
          EXPECT_THAT(
              invalid_text([&] { self.rank == 1 ? zero.step() : zero.zero_grad(); }),
              HasSubstr("one rank calls zero_grad() of the ZeroRedundancyOptimizer and another step()"));
        }
        zero.step();
      }
    });
  });
}

TEST(ZeroJoin, ALoopThatEndsWhereAnotherStepsFailsOnAllRanks) {
  on_ranks(3, [](const Rank& self) {
    Net net;
    Model model(net, self.group);
    ZeroRedundancyOptimizer zero(model, optim::SGD({.lr = 0.1}));
    const std::string text = error_text([&] {
      model.join([&] {
        for (int i = 0; i < (self.rank == 2 ? 3 : 1 + self.rank); ++i) {
          model(input(self.rank, i), false).backward();
          if (self.rank == 1 && i == 1) return;
          zero.step();
        }
      });
    });
    EXPECT_THAT(text, HasSubstr("a loop that ends before step() calls zero_grad()"));
  });
}

}  // namespace
}  // namespace torchspan::sharded::zero_join_test
