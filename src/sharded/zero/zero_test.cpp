#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/memory_state.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::zero_test {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;
using testing::MemoryState;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::over_shared_memory;
using torchspan::testing::PerRank;
using torchspan::testing::Rank;

/// Two dtypes, a scalar, a parameter smaller than the number of ranks, a frozen one, and one that only some
/// forwards use.
struct NetImpl : nn::Module {
  NetImpl() {
    first = register_parameter("first", values({5, 7}, 1));
    bias = register_parameter("bias", values({7}, 2));
    scale = register_parameter("scale", values({}, 3) + 1);
    frozen = register_parameter("frozen", values({7}, 4), /*requires_grad=*/false);
    narrow = register_parameter("narrow", values({7, 3}, 5).to(at::kFloat));
    extra = register_parameter("extra", values({3, 2, 2}, 6));
  }
  static at::Tensor values(at::IntArrayRef sizes, double seed) {
    std::int64_t count = 1;
    for (const auto size : sizes) count *= size;
    return at::arange(count, at::kDouble).mul(0.71).add(seed).sin().reshape(sizes).mul(0.5);
  }
  at::Tensor forward(const at::Tensor& x, bool with_extra) {
    at::Tensor hidden = at::tanh(at::matmul(x, first) + bias) * scale * frozen;
    hidden = at::matmul(hidden.to(at::kFloat), narrow).to(at::kDouble);
    return with_extra ? hidden.sum() * extra.sin().sum() : hidden.pow(2).sum();
  }
  at::Tensor first, bias, scale, frozen, narrow, extra;
};
TORCH_MODULE(Net);

at::Tensor input(int rank, int step) { return NetImpl::values({4, 5}, rank * 1.3 + step * 0.17); }

std::vector<std::pair<std::string, optim::OptimizerSpec>> every_spec() {
  return {{"SGD", optim::SGD({.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01})},
          {"Adam", optim::Adam({.lr = 0.01})},
          {"AdamW", optim::AdamW({.lr = 0.01})},
          {"Adagrad", optim::Adagrad({.lr = 0.05})},
          {"Adadelta", optim::Adadelta()},
          {"RMSprop", optim::RMSprop({.lr = 0.01})},
          {"Rprop", optim::Rprop({.lr = 0.01})},
          {"Adamax", optim::Adamax({.lr = 0.01})}};
}

void expect_equal_parameters(const nn::Module& a, const nn::Module& b) {
  const auto mine = a.named_parameters(), other = b.named_parameters();
  for (const auto& item : mine) {
    EXPECT_TRUE(at::equal(item.value(), other[item.key()])) << item.key() << "\n"
                                                            << item.value() << "\nagainst\n"
                                                            << other[item.key()];
  }
}

data_parallel::DataParallelOptions with_small_buckets(bool view = true) {
  return {.bucket_cap_mb_list = {0.0002}, .find_unused_parameters = true, .gradient_as_bucket_view = view};
}

// peer: zero test_step, test_step_without_closure: same
// peer: zero test_step_with_kwargs: same: options are those of the spec
TEST(ZeroRedundancy, StepsEveryElementwiseOptimizerAsReplicasDo) {
  for (const int size : {1, 2, 3}) {
    for (const auto& [name, spec] : every_spec()) {
      SCOPED_TRACE(name);
      on_ranks(size, [&, spec = spec](const Rank& self) {
        Net mine, replica;
        DistributedDataParallel sharded(mine, self.group, with_small_buckets()),
            plain(replica, self.group, with_small_buckets());
        ZeroRedundancyOptimizer zero(sharded, spec);
        optim::Optimizer optimizer(*replica, spec);
        for (int step = 0; step < 4; ++step) {
          sharded(input(self.rank, step), step % 2 == 1).backward();
          zero.step();
          plain(input(self.rank, step), step % 2 == 1).backward();
          optimizer.step();
          optimizer.zero_grad();
          expect_equal_parameters(*mine, *replica);
          EXPECT_FALSE(mine->first.grad().defined());
        }
      });
    }
  }
}

// peer: zero test_sharding: same: by elements instead of whole parameters
TEST(ZeroRedundancy, KeepsOnlyItsShareOfTheState) {
  constexpr int kSize = 4;
  PerRank<std::size_t> bytes(kSize);
  on_ranks(kSize, [&](const Rank& self) {
    nn::Linear layer(nn::LinearOptions(64, 100));
    DistributedDataParallel ddp(layer, self.group);
    ZeroRedundancyOptimizer zero(ddp, optim::Adam({.lr = 0.01}));
    ddp(at::ones({2, 64})).sum().backward();
    zero.step();
    bytes[self.rank] = zero.state_bytes();
  });
  const std::size_t whole = 2 * sizeof(float) * (64 * 100 + 100);
  for (const std::size_t one : bytes) {
    EXPECT_LT(one, whole / kSize + 200);
    EXPECT_GT(one, whole / kSize - 200);
  }
}

TEST(ZeroRedundancy, AccumulatesWithoutSynchronizationClipsAndChangesRates) {
  for (const bool view : {true, false}) {
    on_ranks(3, [&](const Rank& self) {
      Net mine, replica;
      DistributedDataParallel sharded(mine, self.group, with_small_buckets(view)),
          plain(replica, self.group, with_small_buckets(view));
      const optim::OptimizerSpec spec = optim::Adam({.lr = 0.01});
      ZeroRedundancyOptimizer zero(sharded, spec);
      optim::Optimizer optimizer(*replica, spec);
      for (int step = 0; step < 3; ++step) {
        {
          const auto local = sharded.no_sync();
          sharded(input(self.rank, step), true).backward();
        }
        sharded(input(self.rank, step + 10), true).backward();
        {
          const auto local = plain.no_sync();
          plain(input(self.rank, step), true).backward();
        }
        plain(input(self.rank, step + 10), true).backward();
        const double norm = optimizer.clip_grad_norm(0.25);
        EXPECT_NEAR(zero.clip_grad_norm(0.25), norm, 1e-12 * norm + 1e-7 * norm);
        zero.set_lr(0.01 / (step + 1));
        optimizer.set_lr(0.01 / (step + 1));
        zero.step();
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto other = replica->named_parameters();
      for (const auto& item : mine->named_parameters())
        EXPECT_TRUE(at::allclose(item.value(), other[item.key()], 1e-6, 1e-7)) << item.key();
    });
  }
}

// peer: zero test_multiple_param_groups: same
TEST(ZeroRedundancy, StepsGroupsWithSeparateOptions) {
  on_ranks(2, [&](const Rank& self) {
    Net mine, replica;
    DistributedDataParallel sharded(mine, self.group), plain(replica, self.group);
    const auto groups = [](Net& net) {
      std::vector<optim::ParamGroup> all;
      all.emplace_back(std::vector<at::Tensor>{net->first, net->extra}, optim::SGD({.lr = 0.1}),
                       std::vector<std::string>{"first", "extra"});
      all.emplace_back(std::vector<at::Tensor>{net->scale}, optim::Adam({.lr = 0.02}),
                       std::vector<std::string>{"scale"});
      return all;
    };
    // narrow and bias are averaged but not stepped.
    ZeroRedundancyOptimizer zero(sharded, groups(mine));
    optim::Optimizer optimizer(groups(replica));
    EXPECT_EQ(zero.lrs(), optimizer.lrs());
    for (int step = 0; step < 2; ++step) {
      (sharded(input(self.rank, step), true)).backward();
      zero.step();
      (plain(input(self.rank, step), true)).backward();
      optimizer.step();
      replica->zero_grad();
      expect_equal_parameters(*mine, *replica);
    }
  });
}

// peer: zero test_zero_join_cpu: same
TEST(ZeroRedundancy, StepsForRanksThatHaveRunOutOfBatches) {
  for (const bool clips : {false, true}) {
    on_ranks(3, [&](const Rank& self) {
      Net mine, replica;
      DistributedDataParallel sharded(mine, self.group), plain(replica, self.group);
      const optim::OptimizerSpec spec = optim::Adam({.lr = 0.01});
      ZeroRedundancyOptimizer zero(sharded, spec);
      optim::Optimizer optimizer(*replica, spec);
      const int batches = 2 + self.rank;
      std::vector<double> norms;
      sharded.join([&] {
        for (int step = 0; step < batches; ++step) {
          sharded(input(self.rank, step), true).backward();
          if (clips) norms.push_back(zero.clip_grad_norm(0.25));
          zero.step();
        }
      });
      plain.join([&] {
        for (int step = 0; step < batches; ++step) {
          plain(input(self.rank, step), true).backward();
          if (clips) {
            EXPECT_NEAR(norms[static_cast<std::size_t>(step)], optimizer.clip_grad_norm(0.25), 1e-7);
          }
          optimizer.step();
          optimizer.zero_grad();
        }
      });
      if (!clips) return expect_equal_parameters(*mine, *replica);
      const auto other = replica->named_parameters();
      for (const auto& item : mine->named_parameters())
        EXPECT_TRUE(at::allclose(item.value(), other[item.key()], 1e-6, 1e-7)) << item.key();
    });
  }
}

// peer: zero test_same_dense_param_type: better: dtypes may differ
// peer: zero test_constructor: better: also names what cannot be divided, on all ranks
TEST(ZeroRedundancy, RefusesWhatCannotBeDivided) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    DistributedDataParallel ddp(net, self.group);
    EXPECT_THAT(error_text([&] { ZeroRedundancyOptimizer(ddp, optim::SparseAdam({.lr = 0.1})); }),
                HasSubstr("'SparseAdam' is not known to update each element separately"));
    EXPECT_THAT(error_text([&] {
                  std::vector<optim::ParamGroup> groups;
                  groups.emplace_back(std::vector<at::Tensor>{Net()->first}, optim::SGD({.lr = 0.1}),
                                      std::vector<std::string>{"other"});
                  ZeroRedundancyOptimizer(ddp, groups);
                }),
                HasSubstr("parameter 'other' of a group is not averaged"));
    const optim::OptimizerSpec mixed =
        self.rank == 0 ? optim::OptimizerSpec(optim::SGD({.lr = 0.1})) : optim::OptimizerSpec(optim::Adam());
    EXPECT_THAT(error_text([&] { ZeroRedundancyOptimizer(ddp, mixed); }), HasSubstr("the optimizer"));
    nn::Conv2d layer(nn::Conv2dOptions(2, 3, 2));
    layer->weight.set_data(layer->weight.contiguous(at::MemoryFormat::ChannelsLast));
    DistributedDataParallel strided(layer, self.group);
    EXPECT_THAT(error_text([&] { ZeroRedundancyOptimizer(strided, optim::SGD({.lr = 0.1})); }),
                HasSubstr("parameter 'weight' is not contiguous"));
  });
}

TEST(ZeroRedundancy, ListsFrozenParametersOfItsGroupsAsAnOptimizerOfTheModuleDoes) {
  const auto groups_of = [](Net& net) {
    std::vector<optim::ParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{net->first, net->frozen}, optim::Adam({.lr = 0.1}),
                        std::vector<std::string>{"first", "frozen"});
    groups.emplace_back(std::vector<at::Tensor>{net->bias}, optim::SGD({.lr = 0.2}),
                        std::vector<std::string>{"bias"});
    groups.back().label = "biases";
    return groups;
  };
  std::vector<checkpoint::StateWriter> writers(2), plain(1);
  on_ranks(2, [&](const Rank& self) {
    Net net;
    DistributedDataParallel ddp(net, self.group);
    ZeroRedundancyOptimizer zero(ddp, groups_of(net));
    ddp(input(0, 0), true).backward();
    zero.step();
    zero.state_source()->save(writers[static_cast<std::size_t>(self.rank)]);
    self.group.barrier();
  });
  const MemoryState state(writers);
  Net net;
  optim::Optimizer whole(groups_of(net));
  checkpoint::source_of(whole)->load(state);
  checkpoint::source_of(whole)->save(plain[0]);
  const MemoryState again(plain);
  for (const auto& [name, tensor] : again.tensors()) EXPECT_TRUE(at::equal(tensor, state.read(name))) << name;
  EXPECT_EQ(again.tensors().size(), state.tensors().size());
}

// peer: zero test_zero_grad: same
TEST(ZeroRedundancy, RefusesToAddToGradientsThatArePartlyAverages) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    DistributedDataParallel ddp(net, self.group);
    ZeroRedundancyOptimizer zero(ddp, optim::SGD({.lr = 0.1}));
    EXPECT_THAT(error_text([&] { zero.step(); }), HasSubstr("step() without averaged gradients"));
    ddp(input(self.rank, 0), true).backward();
    EXPECT_THAT(error_text([&] { ddp(input(self.rank, 1), true).backward(); }),
                HasSubstr("neither stepped nor cleared"));
    EXPECT_THAT(error_text([&] { zero.step(); }), HasSubstr("step() without averaged gradients"));
    zero.zero_grad();
    ddp(input(self.rank, 2), true).backward();
    zero.step();
  });
}

TEST(ZeroRedundancy, AGradientThatDoesNotFitOnOneRankFailsOnAllAndChangesNothing) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    DistributedDataParallel ddp(net, self.group);
    ZeroRedundancyOptimizer zero(ddp, optim::SGD({.lr = 0.1}));
    ddp(input(self.rank, 0), true).backward();
    const at::Tensor before = net->first.detach().clone();
    const at::Tensor kept = net->first.grad();
    if (self.rank == 1) net->first.mutable_grad() = kept.t().contiguous().t();
    EXPECT_THAT(error_text([&] { zero.step(); }), HasSubstr("'first' must be dense and contiguous"));
    EXPECT_TRUE(at::equal(net->first, before));
    net->first.mutable_grad() = kept;
    zero.step();
    EXPECT_FALSE(at::equal(net->first, before));
  });
}

TEST(ZeroRedundancy, AnExceptionOfTheProgramOnOneRankFailsOnAllAndChangesNothing) {
  on_ranks(3, [&](const Rank& self) {
    Net net;
    DistributedDataParallel ddp(net, self.group);
    ZeroRedundancyOptimizer zero(ddp, optim::SGD({.lr = 0.1}));
    ddp(input(self.rank, 0), true).backward();
    const at::Tensor before = net->first.detach().clone();
    // Of the first and of the last parameter: a rank has no part of some.
    for (const at::Tensor& bad : {net->parameters().front(), net->parameters().back()}) {
      const auto gradient_of = [&](const at::Tensor& parameter) {
        if (self.rank == 1 && parameter.is_same(bad)) throw std::out_of_range("no such gradient");
        return parameter.grad();
      };
      EXPECT_THAT(error_text([&] { zero.step(gradient_of); }), HasSubstr("no such gradient"));
    }
    const auto gradient_of = [&](const at::Tensor& parameter) {
      if (self.rank == 1) throw std::out_of_range("no such gradient");
      return parameter.grad();
    };
    EXPECT_THAT(error_text([&] { zero.clip_grad_norm(1e9, 2, gradient_of); }), HasSubstr("no such gradient"));
    EXPECT_TRUE(at::equal(net->first, before));
    zero.step();
    EXPECT_FALSE(at::equal(net->first, before));
  });
}

TEST(ZeroRedundancy, ADeadRankFailsTheStepOfTheOthers) {
  if (over_shared_memory()) GTEST_SKIP() << "ranks do not die there";
  on_ranks(3, [&](const Rank& self) {
    Net net;
    DistributedDataParallel ddp(net, self.group);
    ZeroRedundancyOptimizer zero(ddp, optim::SGD({.lr = 0.1}));
    ddp(input(self.rank, 0), true).backward();
    if (self.rank == 1) return self.die();
    EXPECT_THAT(error_text([&] { zero.step(); }), HasSubstr("rank 1 died"));
  });
}

TEST(ZeroRedundancy, WithoutTheOptimizerGradientsAreAveragedEverywhere) {
  on_ranks(2, [&](const Rank& self) {
    Net mine, replica;
    DistributedDataParallel sharded(mine, self.group), plain(replica, self.group);
    { ZeroRedundancyOptimizer zero(sharded, optim::SGD({.lr = 0.1})); }
    sharded(input(self.rank, 0), true).backward();
    plain(input(self.rank, 0), true).backward();
    EXPECT_TRUE(at::equal(mine->first.grad(), replica->first.grad()));
  });
}

/// What `size` ranks save after `steps` steps, beginning from `from`.
std::vector<checkpoint::StateWriter> train_and_save(int size, const MemoryState* from, int steps,
                                                    Net result) {
  std::vector<checkpoint::StateWriter> writers(static_cast<std::size_t>(size));
  on_ranks(size, [&](const Rank& self) {
    Net net;
    DistributedDataParallel ddp(net, self.group);
    ZeroRedundancyOptimizer zero(ddp, optim::Adam({.lr = 0.01}));
    const auto source = zero.state_source();
    if (from != nullptr) {
      source->load(*from);
      const at::NoGradGuard no_grad;
      for (auto& item : net->named_parameters()) item.value().copy_(result->named_parameters()[item.key()]);
      self.group.barrier();
    }
    for (int step = 0; step < steps; ++step) {
      ddp(input(0, step), true).backward();
      zero.step();
    }
    source->save(writers[static_cast<std::size_t>(self.rank)]);
    self.group.barrier();
    if (self.rank > 0) return;
    const at::NoGradGuard no_grad;
    for (auto& item : result->named_parameters()) item.value().copy_(net->named_parameters()[item.key()]);
  });
  return writers;
}

// peer: zero test_state_dict, test_load_state_dict, test_consolidate_state_dict, test_collect_shards: same
TEST(ZeroRedundancy, AnyNumberOfRanksAndOnePlainOptimizerRestoreTheState) {
  Net alone;
  optim::Optimizer optimizer(*alone, optim::Adam({.lr = 0.01}));
  Net trained;
  std::unique_ptr<MemoryState> state;
  for (const int size : {3, 2, 1, 4}) {
    const auto writers = train_and_save(size, state.get(), 2, trained);
    state = std::make_unique<MemoryState>(writers);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      alone->forward(input(0, step), true).backward();
      optimizer.step();
    }
    for (const auto& entry : optimizer.state_view()) {
      ASSERT_TRUE(state->tensors().contains(entry.key())) << entry.key();
      EXPECT_TRUE(at::allclose(state->read(entry.key()), entry.value(), 1e-6, 1e-9)) << entry.key();
    }
  }
  optim::Optimizer plain(*trained, optim::Adam({.lr = 0.5}));
  checkpoint::optimizer_source(plain)->load(*state);
  EXPECT_EQ(plain.lr(), 0.01);
  EXPECT_TRUE(
      at::equal(plain.rule(0).state(0).at("exp_avg"), state->read("group.0.parameter.first.exp_avg")));
}

/// The only parameter with its dtype has no elements, and so has a bucket.
struct HalfImpl : nn::Module {
  HalfImpl(std::int64_t rows, std::int64_t columns, double seed) {
    weight = register_parameter("weight", NetImpl::values({rows, columns}, seed));
    nothing = register_parameter("nothing", at::empty({0, 3}));
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight).tanh() + nothing.sum(); }
  at::Tensor weight, nothing;
};
TORCH_MODULE(Half);
struct HalvesImpl : nn::Module {
  HalvesImpl()
      : encoder(register_module("encoder", Half(5, 4, 1))),
        decoder(register_module("decoder", Half(4, 5, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return decoder(encoder(x)).pow(2).sum(); }
  std::vector<optim::ParamGroup> groups() {
    std::vector<optim::ParamGroup> all;
    all.emplace_back(*encoder, optim::Adam({.lr = 0.01}));
    all.emplace_back(*decoder, optim::AdamW({.lr = 0.02}));
    all.back().label = "second";
    return all;
  }
  Half encoder, decoder;
};
TORCH_MODULE(Halves);

TEST(ZeroRedundancy, GroupsMayHaveParametersWithEqualNamesOrWithoutElements) {
  for (const int size : {1, 2, 3}) {
    std::vector<checkpoint::StateWriter> writers(static_cast<std::size_t>(size));
    optim::StateDict wanted;
    on_ranks(size, [&](const Rank& self) {
      Halves mine, replica;
      DistributedDataParallel sharded(mine, self.group), plain(replica, self.group);
      ZeroRedundancyOptimizer zero(sharded, mine->groups());
      optim::Optimizer optimizer(replica->groups());
      for (int step = 0; step < 2; ++step) {
        sharded(input(self.rank, step)).backward();
        zero.step();
        plain(input(self.rank, step)).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      expect_equal_parameters(*mine, *replica);
      zero.state_source()->save(writers[static_cast<std::size_t>(self.rank)]);
      self.group.barrier();
      if (self.rank == 0) wanted = optimizer.state_dict();
    });
    const MemoryState state(writers);
    Halves net;
    optim::Optimizer restored(net->groups());
    checkpoint::optimizer_source(restored)->load(state);
    for (const auto& entry : restored.state_view()) {
      if (entry.key().find("nothing") != std::string::npos) continue;
      EXPECT_TRUE(at::allclose(entry.value(), wanted[entry.key()], 1e-6, 1e-9)) << entry.key();
    }
  }
}

}  // namespace
}  // namespace torchspan::sharded::zero_test
