#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/memory_state.h"
#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::unit_builder_test {
namespace {

using testing::Dense;
using ::testing::HasSubstr;
using testing::kWidth;
using testing::MemoryState;
using testing::Nest;
using testing::values;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

/// Without a builder, the same modules as plain units.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(UnitBuilder* builder, double seed = 0) {
    for (int i = 0; i < 3; ++i) {
      auto block = builder != nullptr ? builder->build<Dense>(seed + i) : Sharded<Dense>(seed + i);
      if (builder != nullptr) {
        EXPECT_EQ(block->weight.dim(), 1);  // divided before the next one is built
      }
      blocks.push_back(register_module("block" + std::to_string(i), block));
    }
    nest = register_module("nest", builder != nullptr ? builder->build<Nest<Sharded<Dense>>>(seed + 9)
                                                      : Sharded<Nest<Sharded<Dense>>>(seed + 9));
    head = register_parameter("head", values({kWidth, 2}, 77));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);
    return at::matmul(nest->forward(x), head);
  }
  std::vector<Sharded<Dense>> blocks;
  Sharded<Nest<Sharded<Dense>>> nest{nullptr};
  at::Tensor head;
};
TORCH_MODULE(Net);

at::Tensor input(int rank, int step) { return values({3, kWidth}, rank + 0.4 * step); }

// peer: fsdp test_rank0_broadcast_meta_device_init, test_meta_device_1d_init: same: values of rank 0, without the memory of the whole model
TEST(UnitBuilder, ModelsBuiltByUnitsTrainAsOthers) {
  for (const int size : {1, 2, 3}) {
    Net wanted(static_cast<UnitBuilder*>(nullptr));
    optim::Optimizer reference(*wanted, optim::Adam({.lr = 0.01}));
    for (int step = 0; step < 3; ++step) {
      reference.zero_grad();
      for (int rank = 0; rank < size; ++rank)
        (wanted->forward(input(rank, step)).pow(2).sum() / size).backward();
      reference.step();
    }
    std::vector<checkpoint::StateWriter> models(static_cast<std::size_t>(size));
    on_ranks(size, [&](const Rank& self) {
      UnitBuilder builder(self.group);
      Net net(&builder, self.rank * 10);  // rank 0's values count
      FullyShardedDataParallel<Net> model(net, builder);
      EXPECT_EQ(model.stats().units,
                (std::vector<std::string>{"", "block0", "block1", "block2", "nest", "nest.inner"}));
      optim::Optimizer adam(*net, optim::Adam({.lr = 0.01}));
      for (int step = 0; step < 3; ++step) {
        adam.zero_grad();
        model(input(self.rank, step)).pow(2).sum().backward();
        adam.step();
      }
      model.state_source()->save(models[static_cast<std::size_t>(self.rank)]);
      self.group.barrier();
    });
    const MemoryState state(models);
    for (const auto& item : wanted->named_parameters())
      EXPECT_TRUE(at::allclose(state.read(item.key()), item.value(), 1e-10, 1e-12)) << item.key();
  }
}

TEST(UnitBuilder, UnitsThatDifferOrAreNotRegisteredAreErrorsOnAllRanks) {
  on_ranks(2, [&](const Rank& self) {
    UnitBuilder builder(self.group);
    auto lost = builder.build<Dense>(1.0);
    Dense net(2.0);
    EXPECT_THAT(error_text([&] { FullyShardedDataParallel<Dense>(net, builder); }),
                HasSubstr("does not contain unit 1 of 1"));
    UnitBuilder other(self.group);
    EXPECT_THAT(error_text([&] {
                  self.rank == 0 ? static_cast<void>(other.build<Dense>(1.0))
                                 : static_cast<void>(other.build<Nest<Dense>>(1.0));
                }),
                HasSubstr("weight"));
  });
}

TEST(UnitBuilder, AnExceptionInAConstructorReachesTheOtherRanks) {
  struct ThrowsImpl : testing::DenseImpl {
    explicit ThrowsImpl(bool throws) : DenseImpl(1) {
      if (throws) throw_invalid("no such file");
    }
  };
  struct Throws : torch::nn::ModuleHolder<ThrowsImpl> {
    using torch::nn::ModuleHolder<ThrowsImpl>::ModuleHolder;
  };
  on_ranks(2, [&](const Rank& self) {
    UnitBuilder builder(self.group);
    EXPECT_THAT(error_text([&] { builder.build<Throws>(self.rank == 1); }), HasSubstr("no such file"));
  });
}

TEST(UnitBuilder, AParameterThatAUnitSharesIsNamed) {
  on_ranks(2, [&](const Rank& self) {
    UnitBuilder builder(self.group);
    auto unit = builder.build<Dense>(1.0);
    auto net = std::make_shared<torch::nn::Module>();
    net->register_module("unit", unit);
    net->register_parameter("tied", unit->weight);
    EXPECT_THAT(error_text([&] { WrappedUnits(net, builder.model()); }), HasSubstr("'tied'"));
  });
}

TEST(UnitBuilder, AParameterOnAnotherDeviceIsNamed) {
  on_ranks(2, [&](const Rank& self) {
    auto net = std::make_shared<torch::nn::Module>();
    net->register_parameter("here", values({2}, 1));
    net->register_parameter("elsewhere", at::empty({2}, at::TensorOptions(at::kMeta).dtype(at::kDouble)));
    const std::string text = error_text([&] { WrappedUnits(net, UnitBuilder(self.group).model()); });
    EXPECT_THAT(text, HasSubstr("'elsewhere' is on meta and the first one on cpu"));
    EXPECT_THAT(text, HasSubstr("module->to(device)"));
  });
}

}  // namespace
}  // namespace torchspan::sharded::unit_builder_test
