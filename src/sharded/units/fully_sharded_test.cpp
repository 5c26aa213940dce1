#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <torchspan/checkpoint.h>
#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>
#include <torchspan/state/source.h>

#include "sharded/memory_state.h"
#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::fully_sharded_test {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torchspan::testing::error_of;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::over_shared_memory;
using torchspan::testing::PerRank;
using torchspan::testing::Rank;

/// Three units and a root with a head.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Sharded<Dense>(5 * i)));
    head = register_parameter("head", values({kWidth, 2}, 77));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);
    return at::matmul(x, head);
  }
  std::vector<Sharded<Dense>> blocks;
  at::Tensor head;
};
TORCH_MODULE(Net);

at::Tensor input(int rank, int step) { return values({3, kWidth}, rank + 0.4 * step); }

/// Trains in one process on all ranks' inputs.
template <class Optimizer>
void train_alone(Net& net, Optimizer& optimizer, int size, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < size; ++rank) (net->forward(input(rank, step)).pow(2).sum() / size).backward();
    optimizer.step();
  }
}

template <class Optimizer>
void train(FullyShardedDataParallel<Net>& model, Optimizer& optimizer, int rank, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    model(input(rank, step)).pow(2).sum().backward();
    optimizer.step();
  }
}

void expect_close_parameters(FullyShardedDataParallel<Net>& model, const Net& wanted) {
  model.with_full_parameters([&] {
    const auto expected = wanted->named_parameters();
    for (const auto& item : model.module()->named_parameters())
      EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 1e-10, 1e-12)) << item.key();
  });
}

// peer: fsdp test_train_parity_multi_group: same
// peer: fsdp test_train_parity_single_group: same
TEST(FullySharded, TrainsWithOptimizersOfLibTorchAndOurs) {
  for (const int size : {1, 2, 4}) {
    Net ours, theirs;
    optim::Optimizer adam(*ours, optim::Adam({.lr = 0.01}));
    torch::optim::SGD sgd(theirs->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    train_alone(ours, adam, size, 4);
    train_alone(theirs, sgd, size, 4);
    on_ranks(size, [&](const Rank& self) {
      Net net, other;
      FullyShardedDataParallel<Net> model(net, self.group), second(other, self.group);
      optim::Optimizer mine(*net, optim::Adam({.lr = 0.01}));
      torch::optim::SGD stock(other->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
      train(model, mine, self.rank, 4);
      train(second, stock, self.rank, 4);
      expect_close_parameters(model, ours);
      expect_close_parameters(second, theirs);
    });
  }
}

// peer: fsdp test_param_registration_after_forward, test_param_registration_after_backward: same: parameters are parts
//   between forwards, and stay the same tensors
TEST(FullySharded, ParametersAreWholeOnlyInsideTheirUnit) {
  constexpr int kSize = 2;
  on_ranks(kSize, [&](const Rank& self) {
    Net net;
    const auto* before = net->blocks[1]->weight.unsafeGetTensorImpl();
    FullyShardedDataParallel<Net> model(net, self.group);
    std::int64_t mine = 0, whole = 0;
    for (const auto& parameter : net->parameters()) {
      EXPECT_EQ(parameter.dim(), 1);
      EXPECT_TRUE(parameter.is_leaf());
      mine += parameter.numel();
    }
    model.with_full_parameters([&] {
      EXPECT_EQ(net->blocks[1]->weight.sizes(), at::IntArrayRef({kWidth, kWidth}));
      for (const auto& parameter : net->parameters()) whole += parameter.numel();
    });
    EXPECT_LE(mine, whole / kSize + 8);
    at::Tensor loss = model(input(self.rank, 0)).sum();
    EXPECT_EQ(net->blocks[1]->weight.dim(), 1);
    EXPECT_TRUE(net->blocks[1]->weight.is_leaf());
    loss.backward();
    EXPECT_EQ(net->blocks[1]->weight.dim(), 1);
    EXPECT_EQ(net->blocks[1]->weight.grad().sizes(), net->blocks[1]->weight.sizes());
    EXPECT_EQ(net->blocks[1]->weight.unsafeGetTensorImpl(), before);
    EXPECT_EQ(model.stats().units.size(), 4U);
  });
}

// peer: fsdp test_fully_shard_communication_count: same: gathers
// peer: fsdp test_fully_shard_training_memory: same: two gathered units and the gradients of the largest parameter
TEST(FullySharded, GathersAtMostTwoUnitsAndTheGradientsOfOne) {
  for (const bool prefetch : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      Net net;
      FullyShardedDataParallel<Net> model(net, self.group, {.prefetch = prefetch, .overlap_bytes = 0});
      optim::Optimizer sgd(*net, optim::SGD({.lr = 0.05}));
      train(model, sgd, self.rank, 3);
      const std::size_t unit = sizeof(double) * (kWidth * kWidth + 2 * kWidth + 8);
      const std::size_t root = sizeof(double) * (2 * kWidth + 8);
      EXPECT_LE(model.stats().peak_bytes, (prefetch ? 3 : 2) * unit + root);
      // Forward and backward of each unit in each step; the units are gathered no more often with prefetching.
      EXPECT_EQ(model.stats().gathers, 3 * 4 * 2U);
    });
  }
}

TEST(FullySharded, FrozenUnitsAreFreedWhenTheirBackwardEnds) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    for (auto& block : net->blocks) {
      for (auto& parameter : block->parameters()) parameter.requires_grad_(false);
    }
    FullyShardedDataParallel<Net> model(net, self.group, {.overlap_bytes = 0});
    for (int step = 0; step < 2; ++step)
      model(input(self.rank, step).requires_grad_()).pow(2).sum().backward();
    const std::size_t unit = sizeof(double) * (kWidth * kWidth + 2 * kWidth + 8);
    const std::size_t root = sizeof(double) * (2 * kWidth + 8);
    EXPECT_LE(model.stats().peak_bytes, 2 * unit + root);
    EXPECT_TRUE(net->head.grad().defined());
  });
}

/// Some ranks use both weights, others one or none of them.
struct PickImpl : torch::nn::Module {
  PickImpl() {
    first = register_parameter("first", values({kWidth, kWidth}, 1));
    second = register_parameter("second", values({kWidth, kWidth}, 2));
    bias = register_parameter("bias", values({kWidth}, 3));
  }
  at::Tensor forward(at::Tensor x, int mask) {
    if ((mask & 1) != 0) x = at::tanh(at::matmul(x, first));
    if ((mask & 2) != 0) x = at::tanh(at::matmul(x, second));
    return x + bias;
  }
  at::Tensor first, second, bias;
};
TORCH_MODULE(Pick);

struct PickTwiceImpl : torch::nn::Module {
  PickTwiceImpl() {
    outer = register_parameter("outer", values({kWidth, kWidth}, 4));
    one = register_module("one", Sharded<Pick>());
    other = register_module("other", Sharded<Pick>());
  }
  at::Tensor forward(at::Tensor x, int mask) {
    if ((mask & 4) != 0) x = at::tanh(at::matmul(x, outer));
    x = other->forward(one->forward(x, mask), 3 - (mask & 3));
    if ((mask & 8) != 0) x = at::matmul(x, outer);
    return x;
  }
  at::Tensor outer;
  Sharded<Pick> one{nullptr}, other{nullptr};
};
TORCH_MODULE(PickTwice);

TEST(FullySharded, LargeGradientsAreReducedAsSoonAsTheyAreKnown) {
  constexpr std::size_t kLarge = sizeof(double) * kWidth * kWidth;
  on_ranks(2, [&](const Rank& self) {
    Sharded<Pick> net;
    FullyShardedDataParallel<Sharded<Pick>> model(net, self.group,
                                                  {.alone_bytes = kLarge, .overlap_bytes = 0});
    model(input(self.rank, 0), 3).sum().backward();
    // The gathered unit, and one gradient at a time. Chunks of 25 elements on 2 ranks have 13 elements.
    const std::size_t unit = sizeof(double) * 2 * (13 + 13 + 4);
    EXPECT_LE(model.stats().peak_bytes, unit + sizeof(double) * 2 * 13);
    EXPECT_GT(model.stats().peak_bytes, unit);
  });
}

TEST(FullySharded, RanksThatUseDifferentParametersOfAUnitReduceInOneOrder) {
  constexpr int kSize = 4;
  for (const std::size_t alone : {std::size_t{1}, std::size_t{1} << 20}) {
    for (int round = 0; round < 16; ++round) {
      const auto mask = [&](int rank) { return (round + 5 * rank) % 16; };
      PickTwice alone_net;
      for (int rank = 0; rank < kSize; ++rank)
        (alone_net->forward(input(rank, round), mask(rank)).pow(2).sum() / kSize).backward();
      on_ranks(kSize, [&](const Rank& self) {
        PickTwice net;
        FullyShardedDataParallel<PickTwice> model(net, self.group, {.alone_bytes = alone});
        model(input(self.rank, round), mask(self.rank)).pow(2).sum().backward();
        optim::Optimizer sgd(*net, optim::SGD({.lr = 1}));
        sgd.step();
        model.with_full_parameters([&] {
          const auto before = alone_net->named_parameters();
          for (const auto& item : net->named_parameters()) {
            const at::Tensor& whole = before[item.key()];
            const at::Tensor expected = whole.grad().defined() ? whole - whole.grad() : whole;
            EXPECT_TRUE(at::allclose(item.value(), expected, 1e-10, 1e-12)) << item.key();
          }
        });
      });
    }
  }
}

// peer: fsdp test_rank0_offload_full_state_dict: same: parts of the whole model's state
// peer: fsdp test_dp_state_dict_save_load: same: 4 ranks, 2 ranks, one process, replicas
TEST(FullySharded, StateIsThatOfTheWholeModelForAnyNumberOfRanks) {
  Net alone;
  optim::Optimizer adam(*alone, optim::Adam({.lr = 0.01}));
  std::unique_ptr<MemoryState> model_state, optimizer_state;
  for (const int size : {4, 2, 1, 3}) {
    std::vector<state::StateWriter> models(static_cast<std::size_t>(size)), optimizers(models.size());
    on_ranks(size, [&](const Rank& self) {
      Net net;
      FullyShardedDataParallel<Net> model(net, self.group);
      optim::Optimizer mine(*net, optim::Adam({.lr = 0.01}));
      if (model_state) {
        model.state_source()->load(*model_state);
        model.optimizer_source(mine)->load(*optimizer_state);
      }
      for (int step = 0; step < 2; ++step) {
        mine.zero_grad();
        model(input(0, step)).pow(2).sum().backward();
        mine.step();
      }
      model.state_source()->save(models[static_cast<std::size_t>(self.rank)]);
      model.optimizer_source(mine)->save(optimizers[static_cast<std::size_t>(self.rank)]);
      self.group.barrier();
    });
    model_state = std::make_unique<MemoryState>(models);
    optimizer_state = std::make_unique<MemoryState>(optimizers);
    for (int step = 0; step < 2; ++step) {
      adam.zero_grad();
      alone->forward(input(0, step)).pow(2).sum().backward();
      adam.step();
    }
    for (const auto& item : alone->named_parameters())
      EXPECT_TRUE(at::allclose(model_state->read(item.key()), item.value(), 1e-10, 1e-12)) << item.key();
    for (const auto& entry : adam.state_view())
      EXPECT_TRUE(at::allclose(optimizer_state->read(entry.key()), entry.value(), 1e-9, 1e-12))
          << entry.key();
  }
  Net plain;
  checkpoint::module_source(plain.ptr())->load(*model_state);
  optim::Optimizer loaded(*plain, optim::Adam({.lr = 0.5}));
  checkpoint::optimizer_source(loaded)->load(*optimizer_state);
  EXPECT_TRUE(at::equal(plain->head, model_state->read("head")));
  EXPECT_EQ(loaded.lr(), 0.01);
}

TEST(FullySharded, RefusesStepsInBackward) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    optim::Optimizer adam(*net, optim::Adam());
    {
      const auto steps = adam.step_in_backward();
      EXPECT_THAT(error_text([&] { model(input(self.rank, 0)); }),
                  HasSubstr("is stepped in backward by an optimizer"));
    }
    self.group.barrier();
    model(input(self.rank, 0)).sum().backward();
    adam.step();
  });
}

// peer: fsdp test_fully_shard_multi_module_unused_module: same: its gradients stay undefined
TEST(FullySharded, ParametersThatNoRankUsesKeepNoGradient) {
  on_ranks(2, [&](const Rank& self) {
    LayerSpec filter, dense;
    filter.kind = 1, filter.unit = dense.unit = true;
    RandomNet net(std::vector<LayerSpec>{filter, dense});
    FullyShardedDataParallel<RandomNet> model(net, self.group);
    for (const bool skips : {true, false}) {
      const std::vector<std::size_t> skipped =
          skips ? std::vector<std::size_t>{1} : std::vector<std::size_t>{};
      model(input(self.rank, 0), skipped).sum().backward();
      for (const auto& item : net->named_parameters()) {
        const bool used = item.key() != "layer0.unused" && !(skips && item.key().starts_with("layer1"));
        EXPECT_EQ(item.value().grad().defined(), used) << item.key();
      }
    }
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    first = register_module("first", Sharded<Dense>(1));
    second = register_module("second", Sharded<Dense>(2));
    second->weight = second->register_parameter("tied", first->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x)); }
  Sharded<Dense> first{nullptr}, second{nullptr};
};
TORCH_MODULE(Tied);

// peer: fsdp test_train_parity_with_shared_params: same: a parameter of two units belongs to the root
TEST(FullySharded, AParameterOfTwoUnitsGetsTheSumOfItsGradients) {
  Tied alone;
  optim::Optimizer wanted(*alone, optim::SGD({.lr = 0.1}));
  for (int rank = 0; rank < 3; ++rank) (alone->forward(input(rank, 0)).sum() / 3).backward();
  wanted.step();
  on_ranks(3, [&](const Rank& self) {
    Tied net;
    FullyShardedDataParallel<Tied> model(net, self.group);
    optim::Optimizer sgd(*net, optim::SGD({.lr = 0.1}));
    model(input(self.rank, 0)).sum().backward();
    sgd.step();
    model.with_full_parameters([&] {
      EXPECT_TRUE(at::allclose(net->first->weight, alone->first->weight, 1e-12, 1e-12));
      EXPECT_TRUE(net->first->weight.is_same(net->second->weight));
    });
  });
}

TEST(FullySharded, DifferentUnitsOrParametersAreNamedOnAllRanks) {
  on_ranks(2, [&](const Rank& self) {
    const auto spec = [](bool unit, int kind) {
      LayerSpec one;
      one.kind = kind, one.unit = unit;
      return one;
    };
    RandomNet units(std::vector<LayerSpec>{spec(self.rank == 0, 0)});
    EXPECT_THAT(error_text([&] { FullyShardedDataParallel<RandomNet>(units, self.group); }),
                AllOf(HasSubstr("the units"), HasSubstr("'layer0'")));
    RandomNet shapes(std::vector<LayerSpec>{spec(true, self.rank)});
    EXPECT_THAT(error_text([&] { FullyShardedDataParallel<RandomNet>(shapes, self.group); }),
                HasSubstr("layer0"));
    Net net;
    EXPECT_THAT(
        error_text([&] { FullyShardedDataParallel<Net>(net, self.group, {.prefetch = self.rank == 0}); }),
        HasSubstr("prefetch"));
    FullyShardedDataParallel<Net> model(net, self.group);
    EXPECT_THAT(error_text([&] { FullyShardedDataParallel<Net>(net, self.group); }),
                HasSubstr("wrap it once"));
  });
}

// peer: fsdp test_to_float64_after_init: differs: an error names the parameter
TEST(FullySharded, AParameterThatIsReplacedBehindTheWrapperIsNamed) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    net->blocks[1]->bias.set_data(at::zeros({3}, at::kDouble));
    EXPECT_THAT(error_text([&] { model(input(self.rank, 0)); }), HasSubstr("block1.bias"));
  });
}

TEST(FullySharded, AGatherThatFailsOnOneRankReachesTheOthersWithItsReason) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    if (self.rank == 1) net->blocks[1]->bias.set_data(at::zeros({3}, at::kDouble));
    const std::string error = error_text([&] { model.with_full_parameters([] {}); });
    EXPECT_THAT(error, HasSubstr("block1.bias"));
    EXPECT_EQ(error.find("rank 1 failed") != std::string::npos, self.rank == 0) << error;
  });
}

TEST(FullySharded, UnitsRefuseDoubleBackwardAndClones) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    EXPECT_THAT(error_text([&] { net->blocks[0]->clone(); }), HasSubstr("unit 'block0' cannot be cloned"));
    const at::Tensor loss = model(input(self.rank, 0)).sum();
    self.group.barrier();
    EXPECT_THAT(error_text([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
                HasSubstr("double backward (create_graph)"));
  });
}

struct LeakingImpl : DenseImpl {
  using DenseImpl::DenseImpl;
  at::Tensor forward(const at::Tensor& x) {
    hidden = at::tanh(at::linear(x, weight, bias));
    return hidden.detach() * scale;
  }
  at::Tensor hidden;
};
TORCH_MODULE(Leaking);

TEST(FullySharded, ABackwardPastTheOutputsOfAUnitIsAnError) {
  on_ranks(2, [&](const Rank& self) {
    Sharded<Leaking> net(1);
    FullyShardedDataParallel<Sharded<Leaking>> model(net, self.group);
    model(input(self.rank, 0));
    self.group.barrier();  // the failure of one rank ends the forward of another
    EXPECT_ANY_THROW(net->hidden.sum().backward());
  });
}

TEST(FullySharded, RanksThatRunDifferentUnitsGetAnError) {
  on_ranks(2, [&](const Rank& self) {
    LayerSpec dense;
    dense.unit = true;
    RandomNet net(std::vector<LayerSpec>{dense, dense});
    FullyShardedDataParallel<RandomNet> model(net, self.group);
    const std::size_t skipped = static_cast<std::size_t>(self.rank);
    EXPECT_ANY_THROW(model(input(self.rank, 0), std::vector<std::size_t>{skipped}).sum().backward());
  });
}

TEST(FullySharded, RanksThatRunDifferentUnitsAreNamedWithTheirUnits) {
  const auto body = [](const Rank& self) {
    LayerSpec dense;
    dense.unit = true;
    RandomNet net(std::vector<LayerSpec>{dense, dense});
    FullyShardedDataParallel<RandomNet> model(net, self.group);
    const std::size_t skipped = static_cast<std::size_t>(self.rank);
    const std::string error =
        error_text([&] { model(input(self.rank, 0), std::vector<std::size_t>{skipped}).sum().backward(); });
    // Of the shared memory's groups, one rank may meet the difference and tell the others.
    EXPECT_THAT(error, AllOf(HasSubstr("of unit 'layer1'"), HasSubstr("of unit 'layer0'"),
                             HasSubstr("all ranks must run the same units in the same order")));
  };
  on_ranks(2, body);
  torchspan::testing::on_shared_memory_ranks(2, body);
}

TEST(FullySharded, AnExceptionOnOneRankReachesTheOthersWithItsReason) {
  on_ranks(3, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    // The wrong width fails in the first product.
    const at::Tensor x = self.rank == 1 ? values({3, kWidth + 1}, 0) : input(self.rank, 0);
    if (self.rank == 1) {
      EXPECT_ANY_THROW(model(x).sum().backward());
    } else {
      EXPECT_THAT(error_text([&] { model(x).sum().backward(); }),
                  AllOf(HasSubstr("rank 1 failed"), HasSubstr("the forward of unit 'block0' threw")));
    }
    // A rank cannot rejoin inside a pass, so the error of every later use says what to do.
    EXPECT_THAT(
        error_text([&] { model(input(self.rank, 1)); }),
        AllOf(HasSubstr("rank 1 failed"), HasSubstr("build the module again and restore a checkpoint")));
  });
}

TEST(FullySharded, ARankThatDiesBetweenGatherAndFreeIsNamed) {
  if (over_shared_memory()) GTEST_SKIP() << "ranks do not die there";
  on_ranks(3, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    const at::Tensor loss = model(input(self.rank, 0)).sum();
    if (self.rank == 2) {
      loss.register_hook([&](const at::Tensor&) { self.die(); });
      EXPECT_ANY_THROW(loss.backward());
      return;
    }
    EXPECT_THAT(error_text([&] { loss.backward(); }), HasSubstr("rank 2"));
  });
}

TEST(FullySharded, WithoutTheWrapperAnErrorSaysWhatIsMissing) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    const at::Tensor alone = net->forward(input(0, 0));
    {
      FullyShardedDataParallel<Net> model(net, self.group);
      const std::string error = error_text([&] { net->forward(input(0, 0)); });
      EXPECT_THAT(error,
                  AllOf(HasSubstr("unit 'block0' runs outside of a forward"), HasSubstr("call the wrapper")));
      EXPECT_NO_THROW(model(input(self.rank, 0)).sum().backward()) << "nothing is broken";
      const at::NoGradGuard no_grad;
      EXPECT_THAT(error_text([&] { net->forward(input(0, 0)); }), HasSubstr("call the wrapper"));
    }
    EXPECT_THAT(error_text([&] { net->forward(input(0, 0)); }), HasSubstr("was destroyed"));
  });
}

TEST(FullySharded, GuardsOfNoSyncMoveAndEndInAnyOrder) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    std::optional<FullyShardedDataParallel<Net>::NoSync> first, second;
    FullyShardedDataParallel<Net> model(net, self.group);
    const auto reduces = [&] {
      model.zero_grad();
      model(input(self.rank, 0)).sum().backward();
      return net->head.grad().defined();
    };
    EXPECT_TRUE(reduces());
    first = model.no_sync();
    second.emplace(model.no_sync());
    first.reset();
    EXPECT_FALSE(reduces()) << "the second one lives";
    first = std::exchange(second, std::nullopt);
    EXPECT_FALSE(reduces());
    first.reset();
    EXPECT_TRUE(reduces());
    first = model.no_sync();  // and outlives the wrapper
  });
}

TEST(FullySharded, UnitsWorkInSequentialModulesAndUnderNoGrad) {
  on_ranks(2, [&](const Rank& self) {
    torch::nn::Sequential net(Sharded<torch::nn::Linear>(4, 3), torch::nn::Tanh(),
                              Sharded<torch::nn::Linear>(3, 2));
    torch::nn::Sequential alone(torch::nn::Linear(4, 3), torch::nn::Tanh(), torch::nn::Linear(3, 2));
    {
      const at::NoGradGuard no_grad;
      const auto from = net->named_parameters();
      for (auto& item : alone->named_parameters()) {
        self.group.broadcast(from[item.key()].detach(), 0).wait();
        item.value().copy_(from[item.key()]);
      }
    }
    FullyShardedDataParallel<torch::nn::Sequential> model(net, self.group);
    const at::Tensor x = at::ones({2, 4});
    EXPECT_TRUE(at::equal(model(x), alone->forward(x)));
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(model(x), alone->forward(x)));
    EXPECT_EQ(net->parameters()[0].dim(), 1);
  });
}

}  // namespace
}  // namespace torchspan::sharded::fully_sharded_test
