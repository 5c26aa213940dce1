#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <torchspan/checkpoint.h>
#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded/functional.h>
#include <torchspan/sharded/tensor_parallel.h>

#include "sharded/memory_state.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::tensor_parallel_test {
namespace {

namespace nn = torch::nn;
using collective::Group;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::MemoryState;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::PerRank;
using torchspan::testing::Rank;
using Tensors = std::vector<at::Tensor>;

at::Tensor numbers(at::IntArrayRef sizes, double seed) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::arange(count, at::kDouble).mul(0.83).add(seed).sin().reshape(sizes);
}

void expect_close(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  EXPECT_TRUE(at::allclose(got, wanted, 1e-12, 1e-12)) << what << "\n" << got << "\nagainst\n" << wanted;
}

/// An operation on the ranks, and the same on the tensors of all ranks in one process.
struct Operation {
  std::string name;
  std::function<at::Tensor(const at::Tensor&, const Group&)> on_rank;
  std::function<Tensors(const Tensors&)> together;
};

at::Tensor sum_of(const Tensors& tensors) {
  at::Tensor sum = tensors[0];
  for (std::size_t i = 1; i < tensors.size(); ++i) sum = sum + tensors[i];
  return sum;
}

std::vector<Operation> operations(std::int64_t ranks) {
  const auto everywhere = [](const at::Tensor& one, std::size_t count) { return Tensors(count, one); };
  const auto to_all = [](const Tensors& all, std::int64_t split, std::int64_t concat) {
    Tensors results;
    for (std::size_t to = 0; to < all.size(); ++to) {
      Tensors parts;
      for (const auto& one : all)
        parts.push_back(one.chunk(static_cast<std::int64_t>(all.size()), split)[to]);
      results.push_back(at::cat(parts, concat));
    }
    return results;
  };
  std::vector<Operation> list = {{"all_reduce", functional::all_reduce,
                                  [=](const Tensors& all) { return everywhere(sum_of(all), all.size()); }}};
  for (const std::int64_t dim : {0, 1}) {
    list.push_back(
        {"all_gather " + std::to_string(dim),
         [=](const at::Tensor& x, const Group& group) { return functional::all_gather(x, group, dim); },
         [=](const Tensors& all) { return everywhere(at::cat(all, dim), all.size()); }});
    list.push_back(
        {"reduce_scatter " + std::to_string(dim),
         [=](const at::Tensor& x, const Group& group) { return functional::reduce_scatter(x, group, dim); },
         [=](const Tensors& all) { return sum_of(all).chunk(ranks, dim); }});
    list.push_back({"all_to_all " + std::to_string(dim),
                    [=](const at::Tensor& x, const Group& group) {
                      return functional::all_to_all(x, group, dim, 1 - dim);
                    },
                    [=](const Tensors& all) { return to_all(all, dim, 1 - dim); }});
  }
  return list;
}

// peer: fsdp `test_all_reduce_grad`, `test_all_gather_tensor_grad`, `test_reduce_scatter_tensor_grad`,
//   `test_all_to_all_single_grad`: same, against one process
TEST(Functional, GradientsAreThoseOfTheSumOfAllLosses) {
  for (const int ranks : {1, 2, 3}) {
    on_ranks(ranks, [&](const Rank& self) {
      for (const Operation& operation : operations(ranks)) {
        Tensors inputs;
        for (int rank = 0; rank < ranks; ++rank)
          inputs.push_back(numbers({6, 12}, rank).set_requires_grad(true));
        const Tensors outputs = operation.together(inputs);
        at::Tensor loss = at::zeros({}, at::kDouble);
        for (int rank = 0; rank < ranks; ++rank) {
          const at::Tensor& output = outputs[static_cast<std::size_t>(rank)];
          loss = loss + (output * numbers(output.sizes(), 10 + rank)).sum();
        }
        loss.backward();
        const at::Tensor mine = numbers({6, 12}, self.rank).set_requires_grad(true);
        const at::Tensor output = operation.on_rank(mine, self.group);
        expect_close(output.detach(), outputs[static_cast<std::size_t>(self.rank)].detach(), operation.name);
        (output * numbers(output.sizes(), 10 + self.rank)).sum().backward();
        expect_close(mine.grad(), inputs[static_cast<std::size_t>(self.rank)].grad(), operation.name);
      }
    });
  }
}

TEST(Functional, RejectsWhatCannotBeSplitAndSecondDerivatives) {
  on_ranks(2, [](const Rank& self) {
    EXPECT_THAT(error_text([&] {
                  functional::reduce_scatter(at::ones({3, 2}), self.group);
                }),
                AllOf(HasSubstr("[3, 2]"), HasSubstr("2 ranks")));
    EXPECT_THAT(error_text([&] { functional::all_gather(at::ones({3}), self.group, 1); }),
                HasSubstr("dimension 1"));
    EXPECT_THAT(error_text([&] { functional::all_gather(at::ones({3 + self.rank}), self.group); }),
                HasSubstr("[3] and [4]"));
    const at::Tensor x = numbers({2, 2}, self.rank).set_requires_grad(true);
    const at::Tensor loss = functional::all_reduce(x, self.group).pow(2).sum();
    EXPECT_THAT(error_text([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
                HasSubstr("no second derivative"));
    EXPECT_FALSE(functional::all_reduce(at::ones({2}), self.group).requires_grad());
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(functional::all_reduce(x, self.group).requires_grad());
  });
}

/// A module whose parameters have fixed values that do not depend on the rank.
template <class M>
M filled(M module) {
  module->to(at::kDouble);
  double seed = 0;
  const at::NoGradGuard no_grad;
  for (auto& parameter : module->parameters()) parameter.copy_(numbers(parameter.sizes(), seed += 1) * 0.5);
  return module;
}

/// This rank's part of a tensor of the whole module.
at::Tensor part_of(const TensorParallelModule& module, const std::string& name, const at::Tensor& whole) {
  for (const ParameterPart& part : module.parts()) {
    if (part.name != name) continue;
    EXPECT_EQ(at::IntArrayRef(part.shape), whole.sizes()) << name;
    const auto named = module.named_parameters();
    return whole.narrow(part.dim, part.first, named[name].size(part.dim));
  }
  return whole;
}

/// Parameters and gradients of the parallel module are those of the whole one.
void expect_same(const TensorParallelModule& parallel, const nn::Module& whole) {
  const auto wanted = whole.named_parameters();
  for (const auto& item : parallel.named_parameters()) {
    const at::Tensor& one = wanted[item.key()];
    expect_close(item.value().detach(), part_of(parallel, item.key(), one.detach()), item.key());
    expect_close(item.value().grad(), part_of(parallel, item.key(), one.grad()), "gradient of " + item.key());
  }
}

// peer: fsdp `test_linear_col_wise_parallel`, `test_linear_row_wise_parallel`, `test_mlp_training`: same
TEST(TensorParallel, TwoLayersComputeAsInOneProcess) {
  for (const int ranks : {1, 2, 4}) {
    for (const bool bias : {true, false}) {
      on_ranks(ranks, [&](const Rank& self) {
        nn::Linear up = filled(nn::Linear(nn::LinearOptions(3, 8).bias(bias)));
        nn::Linear down = filled(nn::Linear(nn::LinearOptions(8, 5).bias(bias)));
        ColumnParallelLinear column(up, self.group);
        RowParallelLinear row(down, self.group);
        const at::Tensor whole = numbers({2, 4, 3}, 1).set_requires_grad(true);
        const at::Tensor wanted = down(at::gelu(up(whole)));
        (wanted * numbers({2, 4, 5}, 7)).sum().backward();
        const at::Tensor mine = numbers({2, 4, 3}, 1).set_requires_grad(true);
        const at::Tensor got = row(at::gelu(column(mine)));
        expect_close(got.detach(), wanted.detach(), "output");
        (got * numbers({2, 4, 5}, 7)).sum().backward();
        expect_close(mine.grad(), whole.grad(), "gradient of the input");
        expect_same(*column, *up);
        expect_same(*row, *down);
      });
    }
  }
}

TEST(TensorParallel, LayersTakeAndGiveWholeTensorsWhenAsked) {
  on_ranks(2, [](const Rank& self) {
    nn::Linear up = filled(nn::Linear(4, 6)), down = filled(nn::Linear(6, 4));
    ColumnParallelLinear column(up, self.group, ColumnParallelOptions{.gather_output = true});
    RowParallelLinear row(down, self.group, RowParallelOptions{.input_is_part = false});
    const at::Tensor whole = numbers({3, 4}, 1).set_requires_grad(true);
    const at::Tensor wanted = down(up(whole).tanh());
    wanted.pow(2).sum().backward();
    const at::Tensor mine = numbers({3, 4}, 1).set_requires_grad(true);
    const at::Tensor hidden = column(mine);
    EXPECT_EQ(hidden.size(1), 6);
    const at::Tensor got = row(hidden.tanh());
    expect_close(got.detach(), wanted.detach(), "output");
    got.pow(2).sum().backward();
    expect_close(mine.grad(), whole.grad(), "gradient of the input");
    expect_same(*column, *up);
    expect_same(*row, *down);
  });
}

// peer: fsdp `test_sequence_parallel_style`, `test_transformer_training`: same, a block instead of a model
TEST(TensorParallel, ABlockOfPartsOfASequenceComputesAsInOneProcess) {
  on_ranks(2, [](const Rank& self) {
    const nn::LayerNormOptions normalized({4});
    nn::LayerNorm norm = filled(nn::LayerNorm(normalized));
    nn::Linear up = filled(nn::Linear(4, 8)), down = filled(nn::Linear(8, 4));
    SequenceParallelLayerNorm parallel_norm = filled(SequenceParallelLayerNorm(normalized, self.group));
    ColumnParallelLinear column(up, self.group, ColumnParallelOptions{.sequence_dim = 1});
    RowParallelLinear row(down, self.group, RowParallelOptions{.sequence_dim = 1});
    const at::Tensor whole = numbers({2, 6, 4}, 1).set_requires_grad(true);
    const at::Tensor wanted = whole + down(at::gelu(up(norm(whole))));
    (wanted * numbers({2, 6, 4}, 5)).sum().backward();
    const auto part = [&](const at::Tensor& tensor) { return tensor.narrow(1, 3 * self.rank, 3); };
    const at::Tensor mine = part(numbers({2, 6, 4}, 1)).clone().set_requires_grad(true);
    const at::Tensor got = mine + row(at::gelu(column(parallel_norm(mine))));
    expect_close(got.detach(), part(wanted.detach()), "output");
    (got * part(numbers({2, 6, 4}, 5))).sum().backward();
    expect_close(mine.grad(), part(whole.grad()), "gradient of the input");
    expect_same(*parallel_norm, *norm);
    expect_same(*column, *up);
    expect_same(*row, *down);
  });
}

// peer: fsdp `test_embedding_row_wise_parallel`: same
TEST(TensorParallel, AnEmbeddingFindsItsRowsOnAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    on_ranks(ranks, [&](const Rank& self) {
      nn::Embedding whole = filled(nn::Embedding(7, 3));
      VocabularyParallelEmbedding parallel(whole, self.group);
      const at::Tensor indices = at::tensor({6, 0, 3, 3, 5, 2, 6, 1}, at::kLong).reshape({2, 4});
      const at::Tensor wanted = whole(indices), got = parallel(indices);
      expect_close(got.detach(), wanted.detach(), "rows");
      (wanted * numbers({2, 4, 3}, 2)).sum().backward();
      (got * numbers({2, 4, 3}, 2)).sum().backward();
      expect_same(*parallel, *whole);
      EXPECT_THAT(error_text([&] {
                    parallel(at::tensor({2, 7}, at::kLong));
                  }),
                  HasSubstr("index 7 of an embedding of 7 rows"));
      EXPECT_EQ(parallel(at::empty({0, 2}, at::kLong)).sizes(), at::IntArrayRef({0, 2, 3}));
    });
  }
}

TEST(TensorParallel, Rank0GivesTheValues) {
  on_ranks(2, [&](const Rank& self) {
    nn::Linear own(2, 4);
    {
      const at::NoGradGuard no_grad;
      own->weight.fill_(self.rank);
      own->bias.fill_(self.rank);
    }
    ColumnParallelLinear column(own, self.group);
    RowParallelLinear row(own, self.group);
    for (const at::Tensor& one : {column->weight, column->bias, row->weight, row->bias})
      EXPECT_TRUE(at::equal(one.detach(), at::zeros_like(one)));
  });
}

TEST(TensorParallel, FrozenLayersStayFrozen) {
  on_ranks(2, [&](const Rank& self) {
    nn::Linear linear(2, 4);
    linear->weight.requires_grad_(false);
    ColumnParallelLinear column(linear, self.group);
    RowParallelLinear row(linear, self.group);
    for (const at::Tensor& one : {column->weight, row->weight}) EXPECT_FALSE(one.requires_grad());
    for (const at::Tensor& one : {column->bias, row->bias}) EXPECT_TRUE(one.requires_grad());
    linear->bias.requires_grad_(false);
    EXPECT_FALSE(ColumnParallelLinear(linear, self.group)->bias.requires_grad());
    EXPECT_FALSE(RowParallelLinear(linear, self.group)->bias.requires_grad());
    const nn::Embedding embedding = nn::Embedding::from_pretrained(at::ones({4, 2}));
    EXPECT_FALSE(VocabularyParallelEmbedding(embedding, self.group)->weight.requires_grad());
  });
}

TEST(TensorParallel, RejectsWhatCannotBeSplit) {
  on_ranks(2, [](const Rank& self) {
    EXPECT_THAT(error_text([&] { ColumnParallelLinear(3, 5, self.group); }), HasSubstr("5 output features"));
    EXPECT_THAT(error_text([&] { RowParallelLinear(3, 5, self.group); }), HasSubstr("3 input features"));
    EXPECT_THAT(error_text([&] { VocabularyParallelEmbedding(1, 5, self.group); }), HasSubstr("1 rows"));
    EXPECT_THAT(error_text([&] {
                  VocabularyParallelEmbedding(nn::Embedding(nn::EmbeddingOptions(4, 2).padding_idx(0)),
                                              self.group);
                }),
                HasSubstr("padding_idx"));
  });
}

struct ParallelMlpImpl : nn::Module {
  ParallelMlpImpl(const nn::Linear& up, const nn::Linear& down, const Group& group)
      : up(register_module("up", ColumnParallelLinear(up, group))),
        down(register_module("down", RowParallelLinear(down, group))) {}
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
  ColumnParallelLinear up;
  RowParallelLinear down;
};
TORCH_MODULE(ParallelMlp);

struct MlpImpl : nn::Module {
  MlpImpl()
      : up(register_module("up", filled(nn::Linear(3, 8)))),
        down(register_module("down", filled(nn::Linear(8, 2)))) {}
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
  nn::Linear up, down;
};
TORCH_MODULE(Mlp);

// peer: fsdp `test_tp_with_fsdp_offloading`, `test_2d_fsdp_state_enable_extension`, `test_2d_ddp_integration_functionality`:
//   differs: with DistributedDataParallel, against one process
TEST(TensorParallel, TrainsInTwoDimensionsAsInOneProcess) {
  constexpr int kSteps = 4;
  on_ranks(4, [](const Rank& self) {
    const Group parts = self.group.split(self.rank / 2, self.rank);  // ranks 0 and 1, 2 and 3 share a model
    const Group replicas =
        self.group.split(self.rank % 2, self.rank);  // ranks 0 and 2, 1 and 3 have the same parts
    Mlp whole;
    ParallelMlp parallel(whole->up, whole->down, parts);
    DistributedDataParallel model(parallel, replicas);
    torch::optim::SGD reference(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD optimizer(parallel->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor batch = numbers({6, 3}, step);
      reference.zero_grad();
      whole(batch).pow(2).mean().backward();
      reference.step();
      optimizer.zero_grad();
      model(batch.chunk(2)[static_cast<std::size_t>(replicas.rank())]).pow(2).mean().backward();
      optimizer.step();
    }
    for (const auto& [name, mine] :
         {std::pair<std::string, TensorParallelModule*>("up.", parallel->up.get()),
          std::pair<std::string, TensorParallelModule*>("down.", parallel->down.get())}) {
      const auto wanted = whole->named_parameters();
      for (const auto& item : mine->named_parameters()) {
        expect_close(item.value().detach(), part_of(*mine, item.key(), wanted[name + item.key()].detach()),
                     name + item.key());
      }
    }
  });
}

TEST(TensorParallel, AnyNumberOfRanksAndAPlainModuleRestoreACheckpoint) {
  const auto saved_by = [](int ranks, const checkpoint::StateReader* from) {
    std::vector<checkpoint::StateWriter> writers(static_cast<std::size_t>(ranks));
    on_ranks(ranks, [&](const Rank& self) {
      nn::Linear zero_up = nn::Linear(3, 8), zero_down = nn::Linear(8, 2);
      Mlp whole;
      ParallelMlp parallel(from == nullptr ? whole->up : zero_up, from == nullptr ? whole->down : zero_down,
                           self.group);
      if (from != nullptr) parallel->to(at::kDouble);
      const auto source = checkpoint::source_of(parallel);
      if (from != nullptr) source->load(*from);
      source->save(writers[static_cast<std::size_t>(self.rank)]);
    });
    return std::make_unique<MemoryState>(writers);
  };
  const auto of_four = saved_by(4, nullptr);
  const auto of_two = saved_by(2, of_four.get());
  Mlp whole;
  for (const auto& item : whole->named_parameters()) {
    EXPECT_TRUE(at::equal(of_four->tensors().at(item.key()), item.value().detach())) << item.key();
    EXPECT_TRUE(at::equal(of_two->tensors().at(item.key()), item.value().detach())) << item.key();
  }
  on_ranks(2, [&](const Rank& self) {
    ParallelMlp other(nn::Linear(3, 4), nn::Linear(4, 2), self.group);
    other->to(at::kDouble);
    EXPECT_THAT(error_text([&] { checkpoint::source_of(other)->load(*of_four); }),
                AllOf(HasSubstr("up.weight"), HasSubstr("[8, 3]"), HasSubstr("[4, 3]")));
  });
}

TEST(TensorParallel, AnyNumberOfRanksAndAPlainOptimizerRestoreItsState) {
  const auto gradients_of = [](auto& net, int step) { net(numbers({5, 3}, step)).pow(2).mean().backward(); };
  Mlp whole;
  optim::Optimizer reference(*whole, optim::Adam({.lr = 0.01}));
  std::unique_ptr<MemoryState> module_state, state;
  int step = 0;
  for (const int ranks : {4, 2, 1}) {
    std::vector<checkpoint::StateWriter> modules(static_cast<std::size_t>(ranks)), writers(modules.size());
    on_ranks(ranks, [&](const Rank& self) {
      Mlp start;
      ParallelMlp parallel(start->up, start->down, self.group);
      optim::Optimizer adam(*parallel, optim::Adam({.lr = 0.01}));
      const auto of_module = checkpoint::source_of(parallel);
      const auto of_optimizer = checkpoint::source_of(adam);
      if (state) {
        of_module->load(*module_state);
        of_optimizer->load(*state);
      }
      gradients_of(parallel, step);
      adam.step();
      of_module->save(modules[static_cast<std::size_t>(self.rank)]);
      of_optimizer->save(writers[static_cast<std::size_t>(self.rank)]);
      self.group.barrier();
    });
    module_state = std::make_unique<MemoryState>(modules);
    state = std::make_unique<MemoryState>(writers);
    reference.zero_grad();
    gradients_of(whole, step++);
    reference.step();
    for (const auto& entry : reference.state_view())
      EXPECT_TRUE(at::allclose(state->read(entry.key()), entry.value(), 1e-10, 1e-12)) << entry.key();
  }
  Mlp plain;
  optim::Optimizer loaded(*plain, optim::Adam({.lr = 0.5}));
  checkpoint::optimizer_source(loaded)->load(*state);
  EXPECT_EQ(loaded.lr(), 0.01);
}

TEST(TensorParallel, TheStateOfAnOptimizerWithoutNamesIsFoundByItsParameters) {
  std::vector<checkpoint::StateWriter> writers(2);
  PerRank<at::Tensor> moments(2);
  const auto adam_of = [](ParallelMlp& net) {
    return optim::Optimizer(net->parameters(), optim::Adam({.lr = 0.01}));
  };
  on_ranks(2, [&](const Rank& self) {
    Mlp start;
    ParallelMlp parallel(start->up, start->down, self.group);
    optim::Optimizer adam = adam_of(parallel);
    parallel(numbers({5, 3}, 1)).pow(2).mean().backward();
    adam.step();
    checkpoint::source_of(adam)->save(writers[static_cast<std::size_t>(self.rank)]);
    moments[self.rank] = adam.rule(0).state(0).at("exp_avg").clone();
    self.group.barrier();
  });
  EXPECT_FALSE(at::equal(moments[0], moments[1]));
  const MemoryState state(writers);
  on_ranks(2, [&](const Rank& self) {
    Mlp start;
    ParallelMlp parallel(start->up, start->down, self.group);
    optim::Optimizer adam = adam_of(parallel);
    checkpoint::source_of(adam)->load(state);
    EXPECT_TRUE(at::equal(adam.rule(0).state(0).at("exp_avg"), moments[self.rank]));
  });
}

TEST(Functional, CrossEntropyOfHalfScoresHasTheGradientOfALossScale) {
  on_ranks(2, [&](const Rank& self) {
    constexpr double kScale = 65536;  // more than half can hold
    const at::Tensor all = numbers({64, 4096}, 1).to(at::kFloat);
    const at::Tensor targets = at::arange(64, at::kLong) * 63;
    const at::Tensor whole = all.to(at::kHalf).to(at::kFloat).requires_grad_();
    (nn::functional::cross_entropy(whole, targets) * kScale).backward();
    const at::Tensor part = all.to(at::kHalf).narrow(1, 2048 * self.rank, 2048).clone().requires_grad_();
    (functional::vocabulary_parallel_cross_entropy(part, targets, self.group) * kScale).backward();
    const at::Tensor wanted = whole.grad().narrow(1, 2048 * self.rank, 2048);
    EXPECT_EQ(part.grad().scalar_type(), at::kHalf);
    EXPECT_TRUE(at::allclose(part.grad().to(at::kFloat), wanted, 1e-2, 1e-3));
    EXPECT_TRUE((part.grad() != 0).all().item<bool>())
        << "no gradient vanishes before the scale multiplies it";
  });
}

TEST(Functional, CrossEntropyOfDividedClassesIsThatOfAllClasses) {
  for (const int ranks : {1, 2, 3}) {
    on_ranks(ranks, [&](const Rank& self) {
      for (const double scale : {1.0, 1000.0}) {
        const at::Tensor all = numbers({2, 4, 8}, 1) * scale;
        const at::Tensor targets = at::tensor({0, 7, 3, 3, 5, 2, 6, 1}, at::kLong).reshape({2, 4});
        at::Tensor whole = all.clone().requires_grad_();
        const at::Tensor wanted = nn::functional::cross_entropy(whole.reshape({8, 8}), targets.reshape({8}));
        (wanted * 3).backward();
        // Uneven parts on 3 ranks.
        const std::int64_t first = 8 * self.rank / ranks, count = 8 * (self.rank + 1) / ranks - first;
        at::Tensor part = all.narrow(2, first, count).clone().requires_grad_();
        const at::Tensor got = functional::vocabulary_parallel_cross_entropy(part, targets, self.group);
        expect_close(got.detach(), wanted.detach(), "loss");
        (got * 3).backward();
        expect_close(part.grad(), whole.grad().narrow(2, first, count), "gradient");
      }
      EXPECT_THAT(error_text([&] {
                    functional::vocabulary_parallel_cross_entropy(
                        at::zeros({1, 2}), at::full({1}, 2 * ranks, at::kLong), self.group);
                  }),
                  HasSubstr("classes"));
      EXPECT_THAT(error_text([&] {
                    functional::vocabulary_parallel_cross_entropy(at::zeros({1, 2}),
                                                                  at::zeros({2}, at::kLong), self.group);
                  }),
                  HasSubstr("shape [2]"));
    });
  }
}

}  // namespace
}  // namespace torchspan::sharded::tensor_parallel_test
