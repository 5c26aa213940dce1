// Parameters of a FullyShardedDataParallel that are frozen during training, and gradients that a program drops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/core/error.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::changing_gradients_test {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

/// Three units, of which one is computed again during backward, and a root with a head.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Sharded<Dense>(5 * i)));
    head = register_parameter("head", values({kWidth, 2}, 77));
  }
  at::Tensor forward(at::Tensor x) {
    x = blocks[1]->forward(blocks[0]->forward(x));
    const Layer last = [block = blocks[2].ptr()](const at::Tensor& y) { return block->forward(y); };
    x = x.requires_grad() ? recomputed(last, x) : last(x);
    return at::matmul(x, head);
  }
  std::vector<Sharded<Dense>> blocks;
  at::Tensor head;
};
TORCH_MODULE(Net);

at::Tensor input(int rank, int step) { return values({3, kWidth}, rank + 0.4 * step); }

/// A whole unit, parameters of two others, and all of them in turn.
std::vector<at::Tensor> frozen_in(const Net& net, int step) {
  const auto& blocks = net->blocks;
  if (step == 1) return {blocks[0]->weight, blocks[0]->bias, blocks[0]->scale};
  if (step == 2) return {blocks[1]->weight, blocks[2]->bias};
  return {};
}

void set_frozen(const Net& net, int step, bool frozen) {
  for (const at::Tensor& parameter : frozen_in(net, step)) parameter.set_requires_grad(!frozen);
}

void expect_close_parameters(FullyShardedDataParallel<Net>& model, const Net& wanted) {
  model.with_full_parameters([&] {
    const auto expected = wanted->named_parameters();
    for (const auto& item : model.module()->named_parameters())
      EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 1e-10, 1e-12)) << item.key();
  });
}

TEST(ChangingGradients, ParametersMayBeFrozenAndThawedBetweenSteps) {
  constexpr int kSize = 2, kSteps = 4;
  Net wanted;
  optim::Optimizer reference(*wanted, optim::SGD({.lr = 0.1, .momentum = 0.9}));
  for (int step = 0; step < kSteps; ++step) {
    set_frozen(wanted, step, true);
    for (int rank = 0; rank < kSize; ++rank)
      (wanted->forward(input(rank, step)).pow(2).sum() / kSize).backward();
    set_frozen(wanted, step, false);
    reference.step();
    reference.zero_grad();
  }
  on_ranks(kSize, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    optim::Optimizer sgd(*net, optim::SGD({.lr = 0.1, .momentum = 0.9}));
    for (int step = 0; step < kSteps; ++step) {
      set_frozen(net, step, true);
      model(input(self.rank, step)).pow(2).sum().backward();
      for (const at::Tensor& parameter : frozen_in(net, step))
        EXPECT_FALSE(parameter.grad().defined()) << step;
      set_frozen(net, step, false);
      sgd.step();
      sgd.zero_grad();
    }
    expect_close_parameters(model, wanted);
  });
}

TEST(ChangingGradients, AParameterThatWasFrozenWhenItWasDividedCannotBeTrained) {
  on_ranks(2, [](const Rank& self) {
    Net net;
    net->blocks[1]->bias.set_requires_grad(false);
    FullyShardedDataParallel<Net> model(net, self.group);
    net->blocks[1]->bias.set_requires_grad(true);
    EXPECT_THAT(error_text([&] { model(input(self.rank, 0)); }),
                HasSubstr("parameter 'block1.bias' required no gradient when"));
    EXPECT_THAT(
        error_text([&] { net->blocks[1]->forward(input(self.rank, 0)); }),  // outside of the wrapper's
        HasSubstr("parameter 'block1.bias' required no gradient when"));
    self.group.barrier();
    {
      const at::NoGradGuard no_grad;
      model(input(self.rank, 0));
    }
    net->blocks[1]->bias.set_requires_grad(false);
    model(input(self.rank, 0)).sum().backward();
    EXPECT_FALSE(net->blocks[1]->bias.grad().defined());
    EXPECT_TRUE(net->blocks[1]->weight.grad().defined());
  });
}

TEST(ChangingGradients, ZeroGradDropsWhatWasAccumulatedWithoutAReduction) {
  constexpr int kSize = 2;
  Net wanted;
  optim::Optimizer reference(*wanted, optim::SGD({.lr = 0.1}));
  for (int rank = 0; rank < kSize; ++rank) (wanted->forward(input(rank, 1)).pow(2).sum() / kSize).backward();
  reference.step();
  on_ranks(kSize, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    optim::Optimizer sgd(*net, optim::SGD({.lr = 0.1}));
    model(input(self.rank, 2)).pow(2).sum().backward();  // .grad has averages
    {
      const auto local = model.no_sync();
      model(input(self.rank, 3)).pow(2).sum().backward();
    }
    model.zero_grad();
    for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
    model(input(self.rank, 1)).pow(2).sum().backward();
    sgd.step();
    expect_close_parameters(model, wanted);
  });
}

}  // namespace
}  // namespace torchspan::sharded::changing_gradients_test
