#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/checkpoint.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/memory_state.h"
#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::model_state_test {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

/// A unit with a parameter without elements.
struct PartlyEmptyImpl : torch::nn::Module {
  PartlyEmptyImpl() {
    weight = register_parameter("weight", values({kWidth, kWidth}, 1));
    nothing = register_parameter("nothing", at::empty({0, 3}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight).tanh() + nothing.sum(); }
  at::Tensor weight, nothing;
};
TORCH_MODULE(PartlyEmpty);
struct WithEmptyImpl : torch::nn::Module {
  WithEmptyImpl() : unit(register_module("unit", Sharded<PartlyEmpty>())) {}
  at::Tensor forward(const at::Tensor& x) { return unit->forward(x).pow(2).sum(); }
  Sharded<PartlyEmpty> unit;
};
TORCH_MODULE(WithEmpty);

at::Tensor input(int size) { return values({3, kWidth}, 0.4 * size); }

TEST(ModelState, IsFoundByParametersWhateverTheirNamesOrSizes) {
  // Without names, and with those of a part of the model.
  const auto groups_of = [](WithEmpty& net, bool named) {
    std::vector<optim::ParamGroup> all;
    const torch::nn::Module& part = *net->named_children()["unit"];
    if (named) {
      all.emplace_back(part, optim::Adam({.lr = 0.01}));
    } else {
      all.emplace_back(part.parameters(), optim::Adam({.lr = 0.01}));
    }
    return all;
  };
  for (const bool named : {true, false}) {
    WithEmpty alone;
    optim::Optimizer adam(groups_of(alone, named));
    std::unique_ptr<MemoryState> model_state, optimizer_state;
    for (const int size : {2, 3}) {
      std::vector<checkpoint::StateWriter> models(static_cast<std::size_t>(size)), optimizers(models.size());
      on_ranks(size, [&](const Rank& self) {
        WithEmpty net;
        FullyShardedDataParallel<WithEmpty> model(net, self.group);
        optim::Optimizer mine(groups_of(net, named));
        if (model_state) {
          model.state_source()->load(*model_state);
          model.optimizer_source(mine)->load(*optimizer_state);
        }
        mine.zero_grad();
        model(input(size)).backward();
        mine.step();
        model.state_source()->save(models[static_cast<std::size_t>(self.rank)]);
        model.optimizer_source(mine)->save(optimizers[static_cast<std::size_t>(self.rank)]);
        self.group.barrier();
        optim::Optimizer other(*Dense(1), optim::Adam());
        EXPECT_THAT(error_text([&] { model.optimizer_source(other); }),
                    HasSubstr("is not a parameter of this FullyShardedDataParallel"));
      });
      model_state = std::make_unique<MemoryState>(models);
      optimizer_state = std::make_unique<MemoryState>(optimizers);
      adam.zero_grad();
      alone->forward(input(size)).backward();
      adam.step();
      for (const auto& entry : adam.state_view()) {
        if (entry.value().numel() == 0 || entry.key().find("nothing") != std::string::npos) continue;
        ASSERT_TRUE(optimizer_state->tensors().contains(entry.key())) << entry.key();
        EXPECT_TRUE(at::allclose(optimizer_state->read(entry.key()), entry.value(), 1e-9, 1e-12))
            << entry.key();
      }
    }
    WithEmpty plain;
    checkpoint::module_source(plain.ptr())->load(*model_state);
    optim::Optimizer loaded(groups_of(plain, named));
    checkpoint::optimizer_source(loaded)->load(*optimizer_state);
  }
}

}  // namespace
}  // namespace torchspan::sharded::model_state_test
