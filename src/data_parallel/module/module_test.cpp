#include <gtest/gtest.h>
#include <sstream>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>

#include "data_parallel/toy_model.h"

namespace torchspan::data_parallel::module_test {

struct Named {
  at::Tensor first;
  std::vector<at::Tensor> rest;
};

}  // namespace torchspan::data_parallel::module_test

namespace torchspan::data_parallel {

template <>
struct OutputTensors<module_test::Named> {
  static void visit(module_test::Named& value, auto& visitor) {
    visit_tensors(value.first, visitor);
    visit_tensors(value.rest, visitor);
  }
};

}  // namespace torchspan::data_parallel

namespace torchspan::data_parallel::module_test {
namespace {

using namespace testing;
namespace nn = torch::nn;

/// Fills parameters and buffers with values that depend only on `seed`.
void fill(nn::Module& module, double seed) {
  const at::NoGradGuard no_grad;
  for (auto& item : module.named_parameters()) {
    at::Tensor& parameter = item.value();
    seed += 1;
    parameter.copy_(at::arange(parameter.numel(), at::kDouble)
                        .mul(0.71)
                        .add(seed)
                        .sin()
                        .mul(0.4)
                        .reshape(parameter.sizes()));
  }
}

at::Tensor batch(std::int64_t rows, std::int64_t columns, double seed) {
  return at::arange(rows * columns, at::kDouble).mul(0.53).add(seed).cos().reshape({rows, columns});
}

struct MlpImpl : nn::Module {
  MlpImpl(std::vector<std::int64_t> widths) {
    for (std::size_t i = 0; i + 1 < widths.size(); ++i)
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(widths[i], widths[i + 1])));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = at::tanh(layer(x));
    return x;
  }
  std::vector<nn::Linear> layers;
};
TORCH_MODULE(Mlp);

// peer: ddp `DistributedDataParallelCPU`, `gloo_backend_cpu_module`, `DistributedDataParallel`
//   (+grad_is_view); a group of one: same: 1 to 4 ranks, 1e-6 in float, 1e-12 in double
// peer: ddp pass_default_pg: same: the group is always passed explicitly
TEST(DistributedDataParallel, TrainsAsOneProcessOnTheWholeBatch) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const int size = 1 + static_cast<int>(random() % 4);
    const at::ScalarType dtype = random() % 2 ? at::kDouble : at::kFloat;
    std::vector<std::int64_t> widths{3};
    for (unsigned layer = 0; layer < 1 + seed % 4; ++layer)
      widths.push_back(1 + static_cast<std::int64_t>(random() % 9));
    DataParallelOptions options{.bucket_cap_mb = static_cast<double>(1 + random() % 400) / 1048576,
                                .first_bucket_mb = static_cast<double>(1 + random() % 100) / 1048576};
    options.find_unused_parameters = random() % 2;
    options.gradient_as_bucket_view = random() % 2;
    on_ranks(
        size,
        [&](const Rank& self) {
          Mlp whole(widths), mine(widths);
          fill(*whole, 0);
          fill(*mine, self.rank);  // the wrapper broadcasts rank 0's
          whole->to(dtype);
          mine->to(dtype);
          DistributedDataParallel model(mine, self.group, options);
          torch::optim::SGD optimizer(mine->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
              oracle(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
          for (int i = 0; i < 5; ++i) {
            const at::Tensor input = batch(4 * self.size, 3, i).to(dtype);
            optimizer.zero_grad();
            oracle.zero_grad();
            model.forward(input.narrow(0, 4 * self.rank, 4)).pow(2).mean().backward();
            whole->forward(input).pow(2).mean().backward();
            optimizer.step();
            oracle.step();
            for (std::size_t p = 0; p < whole->parameters().size(); ++p)
              expect_close(mine->parameters()[p].detach(), whole->parameters()[p].detach(), tolerance(dtype));
          }
        },
        seed);
  }
}

struct ReturnsImpl : nn::Module {
  ReturnsImpl() : a(register_module("a", nn::Linear(2, 2))), b(register_module("b", nn::Linear(2, 2))) {}
  at::Tensor one(const at::Tensor& x) { return a(x); }
  at::Tensor two(const at::Tensor& x) { return b(x); }
  nn::Linear a, b;
};

template <class Forward>
struct Returning : ReturnsImpl {
  explicit Returning(Forward forward) : body(std::move(forward)) {}
  auto forward(const at::Tensor& x) { return body(*this, x); }
  Forward body;
};

/// Wraps a module whose forward is `forward`, and computes the loss of its result with `loss`.
template <class Forward, class Loss>
void expect_reduced(const Rank& self, Forward forward, Loss loss) {
  for (const DataParallelOptions& options :
       {DataParallelOptions{}, DataParallelOptions{.find_unused_parameters = true},
        DataParallelOptions{.static_graph = true}}) {
    auto module = std::make_shared<Returning<Forward>>(forward);
    fill(*module, 0);
    DistributedDataParallel model(module, self.group, options);
    for (int step = 0; step < 2; ++step) {
      module->zero_grad();
      loss(model(batch(2, 2, self.rank).to(at::kFloat))).backward();
      Returning<Forward> whole(forward);
      fill(whole, 0);
      for (int rank = 0; rank < self.size; ++rank)
        (loss(whole.forward(batch(2, 2, rank).to(at::kFloat))) / self.size).backward();
      for (std::size_t p = 0; p < 4; ++p)
        expect_close(module->parameters()[p].grad(), whole.parameters()[p].grad(), 1e-5);
    }
  }
}

// peer: ddp `arbitrary_forward_return_value`, `ddp_namedtuple`, `dataclass_output` (+unused_param),
//   `ddp_static_graph_nested_types`: same, plain, with unused parameters and with a static graph:
//   `OutputTensors<T>` for user types; an unknown type does not compile
TEST(DistributedDataParallel, FindsTensorsInEveryOutputType) {
  on_ranks(2, [](const Rank& self) {
    using Map = std::map<std::string, at::Tensor>;
    using Either = std::variant<int, at::Tensor>;
    expect_reduced(
        self, [](auto& m, auto x) { return std::make_tuple(m.one(x), 3, m.two(x)); },
        [](const auto& r) { return (std::get<0>(r) * std::get<2>(r)).sum(); });
    expect_reduced(
        self,
        [](auto& m, auto x) {
          return std::vector{m.one(x), m.two(x)};
        },
        [](const auto& r) { return (r[0] * r[1]).sum(); });
    expect_reduced(
        self,
        [](auto& m, auto x) {
          return Map{{"a", m.one(x)}, {"b", m.two(x)}};
        },
        [](const auto& r) { return (r.at("a") * r.at("b")).sum(); });
    expect_reduced(
        self, [](auto& m, auto x) { return std::pair(std::optional(m.one(x)), Either(m.two(x))); },
        [](const auto& r) { return (*r.first * std::get<1>(r.second)).sum(); });
    expect_reduced(
        self,
        [](auto& m, auto x) {
          return Named{m.one(x), {m.two(x), x}};
        },
        [](const auto& r) { return (r.first * r.rest[0]).sum(); });
    expect_reduced(
        self, [](auto& m, auto x) { return m.one(x) * m.two(x); }, [](const auto& r) { return r.sum(); });
  });
}

// peer: ddp ddp_sync_module_states: same
// peer: ddp ddp_broadcast_buffer: same
TEST(DistributedDataParallel, BroadcastsRankZerosParametersAndBuffers) {
  on_ranks(3, [](const Rank& self) {
    nn::BatchNorm1d norm(2);
    fill(*norm, self.rank);
    norm->running_mean.fill_(self.rank + 5);
    DistributedDataParallel model(norm, self.group);
    nn::BatchNorm1d first(2);
    fill(*first, 0);
    EXPECT_TRUE(at::equal(norm->weight, first->weight));
    EXPECT_TRUE(at::equal(norm->running_mean, at::full({2}, 5.0)));
    model.forward(batch(4, 2, self.rank).to(at::kFloat)).pow(3).sum().backward();
    EXPECT_FALSE(at::equal(norm->running_mean, at::full({2}, 5.0)));
    model.forward(batch(4, 2, 0).to(at::kFloat)).pow(3).sum().backward();
    const auto means = self.group.all_gather(norm->running_mean).wait();
    for (const auto& mean : means)
      EXPECT_TRUE(at::equal(mean, means[0]));  // the same batch after the same buffers
  });
}

// peer: ddp ddp_buffer_sync_multi_forward_with_batchnorm: same
TEST(DistributedDataParallel, BroadcastsBuffersBetweenTwoForwardsOfOneBackward) {
  on_ranks(2, [](const Rank& self) {
    nn::Sequential net(nn::Linear(2, 3), nn::BatchNorm1d(3));
    DistributedDataParallel model(net, self.group);
    const at::Tensor real = model.forward(batch(4, 2, self.rank).to(at::kFloat));
    const at::Tensor fake = model.forward(batch(4, 2, 10 + self.rank).to(at::kFloat));
    EXPECT_NO_THROW((real.pow(2).sum() + fake.pow(3).sum()).backward());
    const auto gradients = self.group.all_gather(net->parameters()[0].grad()).wait();
    EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
  });
}

// peer: ddp failure_recovery
TEST(DistributedDataParallel, GoesOnAfterABackwardThatThrewOnOneRank) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(seed);
    on_ranks(
        3,
        [](const Rank& self) {
          bool explodes = self.rank == 1;
          const auto hooked = [&](const at::Tensor& hidden) {
            if (explodes) {
              hidden.register_hook(
                  [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("it exploded"); });
            }
            return hidden;
          };
          nn::Sequential net(nn::Linear(2, 3), nn::Functional(hooked), nn::BatchNorm1d(3));
          DistributedDataParallel model(net, self.group);
          const at::Tensor input = batch(4, 2, self.rank).to(at::kFloat);
          EXPECT_ANY_THROW(model.forward(input).pow(2).sum().backward());
          explodes = false;
          net->zero_grad();
          model.forward(input).pow(3).sum().backward();
          const auto gradients = self.group.all_gather(net->parameters()[0].grad()).wait();
          for (const auto& gradient : gradients) EXPECT_TRUE(at::equal(gradient, gradients[0]));
        },
        seed);
  }
}

// peer: ddp (documented) parameters that change after construction
TEST(DistributedDataParallel, OfAModuleThatIsConvertedAfterwardsFailsByName) {
  on_ranks(2, [](const Rank& self) {
    Mlp mlp(std::vector<std::int64_t>{2, 2});
    DistributedDataParallel model(mlp, self.group, {.unwrapped_backward = OnUnreducedBackward::kThrow});
    model(batch(2, 2, 0).to(at::kFloat)).sum().backward();
    mlp->zero_grad();
    mlp->to(at::kDouble);
    const std::string text = error_text([&] { model(batch(2, 2, 0)).sum().backward(); });
    EXPECT_NE(text.find("'layer0.weight' was converted"), std::string::npos) << text;
  });
}

// peer: ddp save_load_checkpoint
TEST(DistributedDataParallel, GoesOnAfterACheckpointWasLoadedIntoTheWrappedModule) {
  for (const bool find_unused : {false, true}) {
    on_ranks(2, [&](const Rank& self) {
      const std::vector<std::int64_t> widths{2, 3, 2};
      Mlp trained(widths), mine(widths), whole(widths);
      fill(*trained, 4);
      DistributedDataParallel model(
          mine, self.group,
          {.find_unused_parameters = find_unused, .unwrapped_backward = OnUnreducedBackward::kThrow});
      for (int i = 0; i < 3; ++i) {
        std::stringstream file;
        torch::save(trained, file);
        const std::string bytes = file.str();
        for (Mlp* net : {&mine, &whole}) {
          std::stringstream again(bytes);
          torch::load(*net, again);
        }
        if (i == 0) {
          for (const auto& parameter : mine->parameters()) parameter.mutable_grad() = at::Tensor();
        } else {
          mine->zero_grad();
        }
        whole->zero_grad();
        const at::Tensor input = batch(4, 2, i).to(at::kFloat);
        model(input.narrow(0, 2 * self.rank, 2)).pow(2).sum().backward();
        (whole->forward(input).pow(2).sum() / 2).backward();
        for (std::size_t p = 0; p < 4; ++p)
          expect_close(mine->parameters()[p].grad(), whole->parameters()[p].grad(), 1e-6);
        fill(*trained, 5 + i);
      }
      EXPECT_EQ(model.stats().reductions, 3U);
    });
  }
}

// peer: ddp ddp_ignore_params_arg: better: different lists are an error, not a hang
TEST(DistributedDataParallel, LeavesIgnoredParametersAndBuffersAlone) {
  on_ranks(2, [](const Rank& self) {
    Mlp mlp(std::vector<std::int64_t>{2, 2, 2});
    fill(*mlp, self.rank);
    const at::Tensor own = mlp->layers[1]->bias.detach().clone();
    DistributedDataParallel model(mlp, self.group, {.ignored_parameters = {"layer1.bias"}});
    EXPECT_TRUE(at::equal(mlp->layers[1]->bias, own));
    model(batch(3, 2, self.rank).to(at::kFloat)).sum().backward();
    const auto biases = self.group.all_gather(mlp->layers[1]->bias.grad()).wait();
    EXPECT_FALSE(at::equal(biases[0], biases[1]));
    const auto weights = self.group.all_gather(mlp->layers[1]->weight.grad()).wait();
    EXPECT_TRUE(at::equal(weights[0], weights[1]));
    const std::string text = error_text(
        [&] { DistributedDataParallel wrong(mlp, self.group, {.ignored_parameters = {"layer7.bias"}}); });
    EXPECT_NE(text.find("'layer7.bias'"), std::string::npos) << text;
  });
}

// peer: ddp ddp_ignore_params_arg
TEST(DistributedDataParallel, RefusesIgnoreListsThatDiffer) {
  on_ranks(2, [](const Rank& self) {
    Mlp mlp(std::vector<std::int64_t>{2, 2});
    DataParallelOptions options;
    if (self.rank == 1) options.ignored_parameters = {"layer0.bias"};
    const std::string text = error_text([&] { DistributedDataParallel model(mlp, self.group, options); });
    EXPECT_NE(text.find("ignored_parameters"), std::string::npos) << text;
  });
}

// peer: ddp ddp_weight_sharing: same
TEST(DistributedDataParallel, CountsASharedParameterOnceAndKnowsSparseEmbeddings) {
  struct Shared : nn::Module {
    Shared()
        : table(register_module("table", nn::Embedding(nn::EmbeddingOptions(5, 3).sparse(true)))),
          linear(register_module("linear", nn::Linear(3, 3))),
          again(register_module("again", linear)) {}
    at::Tensor forward(const at::Tensor& rows) { return again(at::tanh(linear(table(rows)))); }
    nn::Embedding table;
    nn::Linear linear, again;
  };
  on_ranks(2, [](const Rank& self) {
    auto shared = std::make_shared<Shared>();
    fill(*shared, 1);
    DistributedDataParallel model(shared, self.group);
    EXPECT_EQ(model.stats().bucket_parameters.size(), 2U);
    Shared whole;
    fill(whole, 1);
    for (int i = 0; i < 3; ++i) {
      for (auto& parameter : shared->parameters()) parameter.mutable_grad() = at::Tensor();
      for (auto& parameter : whole.parameters()) parameter.mutable_grad() = at::Tensor();
      const auto rows = [](std::int64_t rank) { return at::tensor(std::vector<std::int64_t>{rank, 4}); };
      model(rows(self.rank)).sum().backward();
      (whole.forward(rows(0)).sum() / 2).backward();
      (whole.forward(rows(1)).sum() / 2).backward();
      EXPECT_TRUE(shared->table->weight.grad().is_sparse());
      expect_close(shared->table->weight.grad(), whole.table->weight.grad().to_dense(), 1e-5);
      expect_close(shared->linear->weight.grad(), whole.linear->weight.grad(), 1e-5);
    }
  });
}

/// A table whose weight is also that of an output layer, which is registered after or before it.
struct TiedTableImpl : nn::Module {
  struct Head : nn::Module {
    explicit Head(const at::Tensor& shared) { weight = register_parameter("weight", shared); }
    at::Tensor weight;
  };
  explicit TiedTableImpl(bool table_first) {
    table = nn::Embedding(nn::EmbeddingOptions(5, 3).sparse(true));
    head = std::make_shared<Head>(table->weight);
    if (table_first) register_module("table", table);
    register_module("head", head);
    if (!table_first) register_module("table", table);
  }
  at::Tensor forward(const at::Tensor& rows) {
    return at::linear(at::tanh(table(rows)), head->weight).sin().sum();
  }
  nn::Embedding table{nullptr};
  std::shared_ptr<Head> head;
};
TORCH_MODULE(TiedTable);

TEST(DistributedDataParallel, AveragesTheDenseGradientOfASparseEmbeddingThatAnotherModuleShares) {
  for (const bool table_first : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      TiedTable mine(table_first), whole(table_first);
      fill(*mine, 1);
      fill(*whole, 1);
      DistributedDataParallel model(mine, self.group);
      const auto rows = [](std::int64_t rank) { return at::tensor(std::vector<std::int64_t>{rank, 4}); };
      for (int i = 0; i < 2; ++i) {
        mine->table->weight.mutable_grad() = at::Tensor();
        whole->table->weight.mutable_grad() = at::Tensor();
        model(rows(self.rank)).backward();
        for (int rank = 0; rank < 2; ++rank) (whole(rows(rank)) / 2).backward();
        EXPECT_FALSE(mine->table->weight.grad().is_sparse());
        expect_close(mine->table->weight.grad(), whole->table->weight.grad(), 1e-5);
      }
    });
  }
}

// peer: ddp save_load_checkpoint: same
TEST(DistributedDataParallel, SavesUnderTheModulesOwnNamesAndLoadsForAll) {
  on_ranks(2, [](const Rank& self) {
    Mlp trained(std::vector<std::int64_t>{2, 3}), plain(std::vector<std::int64_t>{2, 3});
    DistributedDataParallel model(trained, self.group);
    model(batch(2, 2, self.rank).to(at::kFloat)).sum().backward();
    std::stringstream file;
    torch::save(model.module(), file);
    torch::load(plain, file);
    EXPECT_TRUE(at::equal(plain->parameters()[0], trained->parameters()[0]));
    if (self.rank == 1) fill(*trained, 9);
    model.synchronize_state(1);
    const auto weights = self.group.all_gather(trained->parameters()[0].detach()).wait();
    EXPECT_TRUE(at::equal(weights[0], weights[1]));
  });
}

// peer: ddp ddp_returns_tensor_with_no_grad, no_grad, ddp_inference: same
TEST(DistributedDataParallel, SendsNothingWithoutGradMode) {
  on_ranks(2, [](const Rank& self) {
    Mlp mlp(std::vector<std::int64_t>{2, 2});
    DistributedDataParallel model(mlp, self.group);
    if (self.rank == 1) {  // on this rank only: would hang if it communicated
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(model(batch(2, 2, 0).to(at::kFloat)).requires_grad());
    }
    model(batch(2, 2, 0).to(at::kFloat)).sum().backward();
    EXPECT_EQ(model.stats().reductions, 1U);
  });
}

// peer: ddp accumulate_gradients_no_sync
TEST(DistributedDataParallel, NoSyncAccumulatesToTheWholeBatch) {
  on_ranks(2, [](const Rank& self) {
    Mlp mlp(std::vector<std::int64_t>{2, 3}), whole(std::vector<std::int64_t>{2, 3});
    fill(*mlp, 0);
    fill(*whole, 0);
    DistributedDataParallel model(mlp, self.group);
    for (int i = 0; i < 3; ++i) {
      mlp->zero_grad();
      whole->zero_grad();
      const at::Tensor input = batch(8, 2, i).to(at::kFloat);
      {
        const auto guard = model.no_sync();
        model(input.narrow(0, 4 * self.rank, 2)).pow(2).sum().backward();
      }
      model(input.narrow(0, 4 * self.rank + 2, 2)).pow(2).sum().backward();
      (whole->forward(input).pow(2).sum() / 2).backward();
      for (std::size_t p = 0; p < 2; ++p)
        expect_close(mlp->parameters()[p].grad(), whole->parameters()[p].grad(), 1e-5);
    }
    EXPECT_EQ(model.stats().reductions, 3U);
  });
}

TEST(DistributedDataParallel, GuardsOfNoSyncMoveAndEndInAnyOrder) {
  on_ranks(2, [](const Rank& self) {
    std::optional<DistributedDataParallel<Mlp>::NoSync> first, second;
    Mlp mlp(std::vector<std::int64_t>{2, 3});
    DistributedDataParallel model(mlp, self.group);
    const auto reductions = [&] {
      model(batch(2, 2, self.rank).to(at::kFloat)).pow(2).sum().backward();
      return model.stats().reductions;
    };
    EXPECT_EQ(reductions(), 1U);
    first = model.no_sync();
    second.emplace(model.no_sync());
    first.reset();
    EXPECT_EQ(reductions(), 1U) << "the second one lives";
    first = std::exchange(second, std::nullopt);
    EXPECT_EQ(reductions(), 1U);
    first.reset();
    EXPECT_EQ(reductions(), 2U);
    first = model.no_sync();  // and outlives the wrapper
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::module_test
