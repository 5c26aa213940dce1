// What the program does to the parameters and gradients of a ZeroRedundancyOptimizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <sstream>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>
#include <torch/serialize.h>

#include <torchspan/checkpoint.h>
#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/grad_scaler.h>
#include <torchspan/sharded.h>

#include "sharded/parts.h"
#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::zero_changes_test {
namespace {

using ::testing::AllOf;
using testing::Dense;
using ::testing::HasSubstr;
using testing::kWidth;
using testing::values;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(double seed = 0) : first(seed), second(seed + 5) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x)); }
  Dense first, second;
};
TORCH_MODULE(Net);

at::Tensor input(int rank, int step) { return values({3, kWidth}, rank * 1.3 + 0.4 * step); }

template <class Model>
at::Tensor loss_of(Model& model, int rank, int step) {
  return model(input(rank, step)).pow(2).sum();
}

void load(const Net& net, const std::string& bytes) {
  std::istringstream stream(bytes);
  Net target = net;
  torch::load(target, stream);
}
std::string saved(const Net& net) {
  std::ostringstream stream;
  torch::save(net, stream);
  return stream.str();
}

void expect_close(const Net& a, const Net& b) {
  const auto mine = a->named_parameters(), other = b->named_parameters();
  for (const auto& item : mine)
    EXPECT_TRUE(at::allclose(item.value(), other[item.key()], 1e-10, 1e-12)) << item.key();
}

TEST(ZeroChanges, TrainingGoesOnFromParametersThatWereLoaded) {
  for (const bool overlaps : {false, true}) {
    on_ranks(2, [&](const Rank& self) {
      Net mine, replica;
      const std::string other = saved(Net(9));
      DistributedDataParallel<Net> sharded(mine, self.group), plain(replica, self.group);
      ZeroRedundancyOptimizer zero(sharded, optim::Adam({.lr = 0.05}), {.overlap_forward = overlaps});
      optim::Optimizer optimizer(*replica, optim::Adam({.lr = 0.05}));
      for (int step = 0; step < 6; ++step) {
        if (step % 2 == 0) {  // before a forward
          load(mine, other);
          load(replica, other);
        }
        loss_of(sharded, self.rank, step).backward();
        loss_of(plain, self.rank, step).backward();
        zero.step();
        optimizer.step();
        optimizer.zero_grad();
        zero.synchronize();
        expect_close(mine, replica);
      }
    });
  }
}

TEST(ZeroChanges, AnEvaluationWithOtherParametersLeavesTheTrainedOnes) {
  on_ranks(2, [](const Rank& self) {
    Net net;
    const Net other(9);
    DistributedDataParallel<Net> model(net, self.group);
    ZeroRedundancyOptimizer zero(model, optim::SGD({.lr = 0.1}));
    loss_of(model, self.rank, 0).backward();
    zero.step();
    const at::Tensor trained = net->first->weight.detach(), values_before = trained.clone();
    net->first->weight.set_data(other->first->weight.detach());
    {
      const at::NoGradGuard evaluation;
      model(input(self.rank, 1));
    }
    net->first->weight.set_data(trained);
    EXPECT_TRUE(at::equal(net->first->weight, values_before));
    loss_of(model, self.rank, 2).backward();
    zero.step();
    EXPECT_FALSE(at::equal(net->first->weight, values_before)) << "training goes on";
  });
}

TEST(ZeroChanges, ParametersThatOneRankLoadedAreBroadcast) {
  on_ranks(3, [](const Rank& self) {
    Net mine, wanted(9);
    DistributedDataParallel<Net> model(mine, self.group);
    ZeroRedundancyOptimizer zero(model, optim::SGD({.lr = 0.1}));
    loss_of(model, self.rank, 0).backward();
    zero.step();
    if (self.rank == 1) load(mine, saved(wanted));
    model.synchronize_state(1);
    expect_close(mine, wanted);
    loss_of(model, self.rank, 1).backward();
    zero.step();
    EXPECT_FALSE(at::allclose(mine->first->weight, wanted->first->weight)) << "nothing was trained";
    model.synchronize_state(0);
  });
}

TEST(ZeroChanges, AParameterThatWasConvertedIsNamed) {
  on_ranks(2, [](const Rank& self) {
    Net net;
    DistributedDataParallel<Net> model(net, self.group);
    ZeroRedundancyOptimizer zero(model, optim::SGD({.lr = 0.1}));
    loss_of(model, self.rank, 0).backward();
    if (self.rank == 1) net->second->weight.set_data(net->second->weight.to(at::kFloat));
    EXPECT_THAT(error_text([&] { zero.step(); }),
                AllOf(HasSubstr("rank 1"), HasSubstr("'second.weight' is Float"), HasSubstr("was Double")));
  });
}

TEST(ZeroChanges, ParametersThatShareMemoryAreRefused) {
  on_ranks(2, [](const Rank& self) {
    Net net;
    net->second->weight.set_data(net->first->weight.detach());
    const auto names = AllOf(HasSubstr("'first.weight' and 'second.weight' share memory"));
    DistributedDataParallel<Net> model(net, self.group);
    EXPECT_THAT(error_text([&] { ZeroRedundancyOptimizer(model, optim::SGD({.lr = 0.1})); }), names);
    EXPECT_THAT(error_text([&] { FullyShardedDataParallel<Net>(net, self.group); }), names);
  });
}

TEST(ZeroChanges, AStateThatCannotBeDividedIsNotSaved) {
  struct WaveImpl : torch::nn::Module {
    WaveImpl() { phases = register_parameter("phases", at::complex(values({7}, 1), values({7}, 2))); }
    at::Tensor forward(const at::Tensor& x) const { return at::real(phases).sum() * x; }
    at::Tensor phases;
  };
  struct Wave : torch::nn::ModuleHolder<WaveImpl> {
    using torch::nn::ModuleHolder<WaveImpl>::ModuleHolder;
  };
  on_ranks(2, [](const Rank& self) {
    Wave wave(std::make_shared<WaveImpl>());
    DistributedDataParallel<Wave> model(wave, self.group);
    ZeroRedundancyOptimizer zero(model, optim::Adam({.lr = 0.05}));
    model(at::ones({}, at::kDouble)).backward();
    zero.step();
    checkpoint::StateWriter writer;
    EXPECT_THAT(error_text([&] { zero.state_source()->save(writer); }),
                AllOf(HasSubstr("phases"), HasSubstr("complex parameters")));
  });
}

/// One rank's gradient is not finite in one of the steps.
TEST(ZeroChanges, GradScalerTrainsAsWithReplicas) {
  on_ranks(2, [](const Rank& self) {
    Net mine, replica;
    DistributedDataParallel<Net> sharded(mine, self.group), plain(replica, self.group);
    ZeroRedundancyOptimizer zero(sharded, optim::Adam({.lr = 0.05}));
    optim::Optimizer optimizer(*replica, optim::Adam({.lr = 0.05}));
    optim::GradScaler scaler({.init_scale = 8, .growth_interval = 2}),
        other({.init_scale = 8, .growth_interval = 2});
    EXPECT_THAT(error_text([&] { scaler.unscale_(zero); }), HasSubstr("without averaged gradients"));
    for (int step = 0; step < 6; ++step) {
      const double factor = step == 3 && self.rank == 1 ? std::numeric_limits<double>::infinity() : 1;
      scaler.scale(loss_of(sharded, self.rank, step) * factor).backward();
      other.scale(loss_of(plain, self.rank, step) * factor).backward();
      if (step > 0) {
        scaler.unscale_(zero);
        other.unscale_(optimizer);
        EXPECT_THAT(error_text([&] { scaler.unscale_(zero); }), HasSubstr("already called"));
        const double norm = zero.clip_grad_norm(0.5), wanted = optimizer.clip_grad_norm(0.5);
        if (step != 3) EXPECT_NEAR(norm, wanted, 1e-10);
      }
      EXPECT_EQ(scaler.step(zero), step != 3);
      EXPECT_EQ(other.step(optimizer), step != 3);
      zero.zero_grad();
      optimizer.zero_grad();
      scaler.update();
      other.update();
      EXPECT_EQ(scaler.get_scale(), other.get_scale());
      expect_close(mine, replica);
    }
  });
}

TEST(Overlapping, FindsTensorsWithCommonElementsOnly) {
  const at::Tensor memory = at::zeros({24});
  const auto part = [&](std::int64_t begin, std::int64_t count) { return memory.narrow(0, begin, count); };
  EXPECT_FALSE(overlapping({}));
  EXPECT_FALSE(
      overlapping({part(6, 6), part(0, 6), part(12, 0), at::zeros({3}), part(12, 12).view({3, 4}).t()}));
  EXPECT_EQ(overlapping({part(12, 6), at::zeros({3}), part(0, 6), part(5, 2)}),
            std::pair(std::size_t{2}, std::size_t{3}));
  EXPECT_EQ(overlapping({part(0, 24), part(3, 1), part(8, 1)}), std::pair(std::size_t{0}, std::size_t{1}));
  const at::Tensor matrix = memory.view({12, 2});
  EXPECT_FALSE(overlapping({matrix.select(1, 0), matrix.select(1, 1)})) << "they alternate";
}

}  // namespace
}  // namespace torchspan::sharded::zero_changes_test
