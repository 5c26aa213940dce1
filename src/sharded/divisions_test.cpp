// Checkpoints, clipping and loss scaling of one model that is divided in different ways: what a program gives them are the
// module and the optimizer, never how they are divided.
#include <array>
#include <filesystem>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/checkpoint.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/grad_scaler.h>
#include <torchspan/sharded.h>
#include <torchspan/sharded/tensor_parallel.h>

#include "sharded/memory_state.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::divisions_test {
namespace {

namespace nn = torch::nn;
using collective::Group;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::MemoryState;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

std::string error_or_none(const std::function<void()>& body) {
  try {
    body();
    return "";
  } catch (const Error& error) {
    return error.message();
  }
}

constexpr int kBatch = 12;
constexpr double kMaxNorm = 0.3;

at::Tensor numbers(at::IntArrayRef sizes, double seed) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::arange(count, at::kDouble).mul(0.83).add(seed).sin().reshape(sizes);
}

nn::Linear filled(nn::Linear layer, double seed) {
  layer->to(at::kDouble);
  const at::NoGradGuard no_grad;
  layer->weight.copy_(numbers(layer->weight.sizes(), seed) * 0.5);
  layer->bias.copy_(numbers(layer->bias.sizes(), seed + 1) * 0.5);
  return layer;
}
nn::Linear up_layer() { return filled(nn::Linear(6, 8), 2); }
nn::Linear down_layer() { return filled(nn::Linear(8, 6), 4); }

struct WholeMlpImpl : nn::Module {
  WholeMlpImpl() : up(register_module("up", up_layer())), down(register_module("down", down_layer())) {}
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
  nn::Linear up, down;
};
TORCH_MODULE(WholeMlp);

struct ParallelMlpImpl : nn::Module {
  explicit ParallelMlpImpl(const Group& group)
      : up(register_module("up", ColumnParallelLinear(up_layer(), group))),
        down(register_module("down", RowParallelLinear(down_layer(), group))) {}
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
  ColumnParallelLinear up;
  RowParallelLinear down;
};
TORCH_MODULE(ParallelMlp);

template <class Mlp>
struct NetImpl : nn::Module {
  template <class... Arguments>
  explicit NetImpl(const Arguments&... arguments)
      : in(register_module("in", filled(nn::Linear(3, 6), 6))),
        mlp(register_module("mlp", Mlp(arguments...))),
        out(register_module("out", filled(nn::Linear(6, 1), 8))) {
    in->bias.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) { return out(mlp->forward(in(x)) + 1); }
  nn::Linear in;
  Mlp mlp;
  nn::Linear out;
};
template <class Mlp>
class Net : public nn::ModuleHolder<NetImpl<Mlp>> {
 public:
  using nn::ModuleHolder<NetImpl<Mlp>>::ModuleHolder;
};

/// A program on one rank. It has part `part` of `parts` of each batch.
struct Program {
  nn::Module& module;
  std::function<at::Tensor(const at::Tensor&)> forward;
  optim::Optimizer* optimizer = nullptr;  ///< or
  ZeroRedundancyOptimizer* zero = nullptr;
  int part = 0, parts = 1;
  std::function<double(double max_norm)> clip_by_wrapper = nullptr;  ///< clips in even steps, if there is one

  checkpoint::SourcePtr model_source() const { return checkpoint::source_of(module); }
  checkpoint::SourcePtr optimizer_source() const {
    return zero != nullptr ? checkpoint::source_of(*zero) : checkpoint::source_of(*optimizer);
  }
  void backward(int step, double scale = 1) const {
    const at::Tensor batch = numbers({kBatch, 3}, step).chunk(parts)[static_cast<std::size_t>(part)];
    (forward(batch).pow(2).mean() * scale).backward();
  }
  double train(int step) const {
    backward(step);
    const double norm = clip_by_wrapper && step % 2 == 0 ? clip_by_wrapper(kMaxNorm)
                        : zero != nullptr                ? zero->clip_grad_norm(kMaxNorm)
                                                         : optimizer->clip_grad_norm(kMaxNorm);
    zero != nullptr ? zero->step() : optimizer->step();
    zero != nullptr ? zero->zero_grad() : optimizer->zero_grad();
    return norm;
  }
};

/// One way to divide the model, on a number of ranks.
struct Division {
  std::string name;
  int ranks = 1;
  std::function<void(const Rank& self, const std::function<void(const Program&)>& body)> run;
};

optim::Adam adam() { return {.lr = 0.05}; }

template <class Mlp>
void run_alone(Net<Mlp> net, const std::function<void(const Program&)>& body) {
  optim::Optimizer optimizer(*net, adam());
  body({*net, [&](const at::Tensor& x) { return net(x); }, &optimizer});
}

template <class Mlp>
void run_replicated(Net<Mlp> net, const Group& group, const std::function<void(const Program&)>& body) {
  DistributedDataParallel<Net<Mlp>> model(net, group);
  optim::Optimizer optimizer(*net, adam());
  body(
      {*net, [&](const at::Tensor& x) { return model(x); }, &optimizer, nullptr, group.rank(), group.size()});
}

template <class Mlp>
void run_zero(Net<Mlp> net, const Group& group, const std::function<void(const Program&)>& body) {
  DistributedDataParallel<Net<Mlp>> model(net, group, {.bucket_cap_mb = 0.0003, .first_bucket_mb = 0.0002});
  ZeroRedundancyOptimizer optimizer(model, adam());
  body(
      {*net, [&](const at::Tensor& x) { return model(x); }, nullptr, &optimizer, group.rank(), group.size()});
}

template <class Mlp>
void run_sharded(Net<Mlp> net, const Group& group, int shard_ranks,
                 const std::function<void(const Program&)>& body) {
  FullyShardedDataParallel<Net<Mlp>> model(net, group, {.shard_ranks = shard_ranks});
  optim::Optimizer optimizer(*net, adam());
  body({*net, [&](const at::Tensor& x) { return model(x); }, &optimizer, nullptr, group.rank(), group.size(),
        [&](double max_norm) { return model.clip_grad_norm(max_norm); }});
}

std::vector<Division> divisions() {
  const auto tensor_group = [](const Rank& self) { return self.group.split(self.rank / 2, self.rank); };
  const auto data_group = [](const Rank& self) { return self.group.split(self.rank % 2, self.rank); };
  return {
      {"one process", 1, [](const Rank&, const auto& body) { run_alone(Net<WholeMlp>(), body); }},
      {"replicas", 3,
       [](const Rank& self, const auto& body) { run_replicated(Net<WholeMlp>(), self.group, body); }},
      {"tensor parallel", 2,
       [](const Rank& self, const auto& body) { run_alone(Net<ParallelMlp>(self.group), body); }},
      {"ZeRO", 3, [](const Rank& self, const auto& body) { run_zero(Net<WholeMlp>(), self.group, body); }},
      {"sharded", 3,
       [](const Rank& self, const auto& body) {
         run_sharded(Net<Sharded<WholeMlp>>(), self.group, 0, body);
       }},
      {"sharded, two copies", 4,
       [](const Rank& self, const auto& body) {
         run_sharded(Net<Sharded<WholeMlp>>(), self.group, 2, body);
       }},
      {"replicas of tensor parallel", 4,
       [=](const Rank& self, const auto& body) {
         run_replicated(Net<ParallelMlp>(tensor_group(self)), data_group(self), body);
       }},
      {"ZeRO over tensor parallel", 4,
       [=](const Rank& self, const auto& body) {
         run_zero(Net<ParallelMlp>(tensor_group(self)), data_group(self), body);
       }},
      {"sharded over tensor parallel", 4,
       [=](const Rank& self, const auto& body) {
         run_sharded(Net<Sharded<ParallelMlp>>(tensor_group(self)), data_group(self), 0, body);
       }},
  };
}

struct Saved {
  std::unique_ptr<MemoryState> model, optimizer;
};

/// Trains a step from what was saved, if anything, with another learning rate to restore; returns what is saved then.
Saved trained_by(const Division& division, int step, const Saved* from, double wanted_norm) {
  std::vector<checkpoint::StateWriter> models(static_cast<std::size_t>(division.ranks)),
      optimizers(models.size());
  on_ranks(division.ranks, [&](const Rank& self) {
    division.run(self, [&](const Program& program) {
      if (from != nullptr) {
        program.model_source()->load(*from->model);
        program.optimizer_source()->load(*from->optimizer);
      }
      EXPECT_NEAR(program.train(step), wanted_norm, 1e-10) << division.name << ", rank " << self.rank;
      program.model_source()->save(models[static_cast<std::size_t>(self.rank)]);
      program.optimizer_source()->save(optimizers[static_cast<std::size_t>(self.rank)]);
      self.group.barrier();
    });
  });
  return {std::make_unique<MemoryState>(models), std::make_unique<MemoryState>(optimizers)};
}

void expect_same(const MemoryState& got, const MemoryState& wanted, const std::string& what) {
  std::vector<std::string> names, expected;
  for (const auto& [name, tensor] : got.tensors()) names.push_back(name);
  for (const auto& [name, tensor] : wanted.tensors()) {
    expected.push_back(name);
    if (!got.tensors().contains(name)) continue;
    const at::Tensor& mine = got.tensors().at(name);
    ASSERT_EQ(mine.sizes(), tensor.sizes()) << what << ": " << name;
    EXPECT_TRUE(at::allclose(mine.to(at::kDouble), tensor.to(at::kDouble), 1e-9, 1e-12))
        << what << ": " << name;
  }
  EXPECT_EQ(names, expected) << what;
}

// peer: fsdp `test_2d_mlp_with_nd_mesh`, `test_clip_grad_norm_2d`, `test_2d_state_dict_save_load`: better: also ZeRO, and
//   checkpoints of any of nine divisions in others
TEST(Divisions, TrainClipAndSaveAsOneProcessAndRestoreWhatAnotherOneSaved) {
  const std::vector<Division> all = divisions();
  std::vector<Saved> wanted;
  std::vector<double> norms;
  std::vector<checkpoint::StateWriter> none(1);
  Net<WholeMlp> reference;
  run_alone(reference, [&](const Program& program) {
    for (int step = 0; step < 2; ++step) {
      norms.push_back(program.train(step));
      EXPECT_GT(norms.back(), kMaxNorm) << "nothing is clipped";
      std::vector<checkpoint::StateWriter> model(1), optimizer(1);
      program.model_source()->save(model[0]);
      program.optimizer_source()->save(optimizer[0]);
      const auto copy = [](checkpoint::StateWriter& from) {
        checkpoint::StateWriter to;
        for (const auto& one : from.tensors()) to.add(one.name, one.tensor.clone());
        return std::vector<checkpoint::StateWriter>{to};
      };
      wanted.push_back(
          {std::make_unique<MemoryState>(copy(model[0])), std::make_unique<MemoryState>(copy(optimizer[0]))});
    }
  });
  std::vector<Saved> first;
  for (const Division& division : all) {
    first.push_back(trained_by(division, 0, nullptr, norms[0]));
    expect_same(*first.back().model, *wanted[0].model, division.name);
    expect_same(*first.back().optimizer, *wanted[0].optimizer, division.name);
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (const std::size_t from : {std::size_t{0}, (i + 1) % all.size(), (i + 4) % all.size()}) {
      const std::string what = all[i].name + " from " + all[from].name;
      const Saved second = trained_by(all[i], 1, &first[from], norms[1]);
      expect_same(*second.model, *wanted[1].model, what);
      expect_same(*second.optimizer, *wanted[1].optimizer, what);
    }
  }
}

TEST(Divisions, AllRanksSkipAStepIfOneHasAGradientThatIsNotFinite) {
  for (const Division& division : divisions()) {
    on_ranks(division.ranks, [&](const Rank& self) {
      division.run(self, [&](const Program& program) {
        optim::GradScaler scaler({.init_scale = 8});
        std::vector<at::Tensor> before;
        for (const at::Tensor& parameter : program.module.parameters())
          before.push_back(parameter.detach().clone());
        program.backward(0, scaler.scale(at::ones({}, at::kDouble)).item<double>());
        // In one part of a layer only, but in all copies of it, as an overflow would be.
        if (division.ranks == 4 ? self.rank % 2 == 1 : self.rank == division.ranks - 1) {
          for (const at::Tensor& parameter : program.module.parameters()) {
            at::Tensor gradient = parameter.grad();
            if (gradient.defined()) gradient.fill_(std::numeric_limits<double>::infinity());
          }
        }
        const bool whole = division.name.starts_with("replicas") && division.ranks == 3;
        if (!whole) {  // gradients of replicas are equal; what one rank changes afterwards is its own
          EXPECT_FALSE(program.zero != nullptr ? scaler.step(*program.zero) : scaler.step(*program.optimizer))
              << division.name << ", rank " << self.rank;
        }
        scaler.update(4);
        self.group.barrier();
      });
    });
  }
}

TEST(Divisions, AFolderOfAPartOfAModelIsRefused) {
  const std::string folder = ::testing::TempDir() + "torchspan-divisions-" + std::to_string(::getpid());
  for (const Division& division : divisions()) {
    const bool whole =
        division.name == "one process" || division.name == "replicas" || division.name == "ZeRO";
    on_ranks(division.ranks, [&](const Rank& self) {
      division.run(self, [&](const Program& program) {
        const std::string mine = folder + std::to_string(self.rank);
        const std::string error = error_or_none([&] { checkpoint::save_model(program.module, mine); });
        if (whole) {
          EXPECT_EQ(error, "") << division.name;
        } else {
          EXPECT_THAT(error, AllOf(HasSubstr("a part of '"), HasSubstr("CheckpointManager")))
              << division.name;
        }
        std::filesystem::remove_all(mine);
        self.group.barrier();
      });
    });
  }
}

TEST(Divisions, AModelFolderLoadsIntoAnyDivision) {
  const std::string folder = ::testing::TempDir() + "torchspan-divisions-" + std::to_string(::getpid());
  Net<WholeMlp> saved;
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : saved->parameters()) parameter.mul_(-3);
  }
  checkpoint::save_model(*saved, folder);
  std::vector<checkpoint::StateWriter> wanted(1);
  checkpoint::module_source(saved.ptr())->save(wanted[0]);
  for (const Division& division : divisions()) {
    std::vector<checkpoint::StateWriter> models(static_cast<std::size_t>(division.ranks));
    on_ranks(division.ranks, [&](const Rank& self) {
      division.run(self, [&](const Program& program) {
        checkpoint::load_model(program.module, folder);
        program.model_source()->save(models[static_cast<std::size_t>(self.rank)]);
        self.group.barrier();
      });
    });
    expect_same(MemoryState(models), MemoryState(wanted), division.name);
  }
  std::filesystem::remove_all(folder);
}

struct StatisticsImpl : nn::Module {
  StatisticsImpl() {
    weight = register_parameter("weight", at::ones({2}, at::kDouble));
    local = register_parameter("local", at::ones({3}, at::kDouble));
    seen = register_buffer("seen", at::zeros({1}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen += x.sum().detach();
    return (x * weight).sum() + local.sum();
  }
  at::Tensor weight, local, seen;
};
TORCH_MODULE(Statistics);

data_parallel::DataParallelOptions with_own(bool own_parameter) {
  data_parallel::DataParallelOptions options;
  options.broadcast_buffers = false;
  if (own_parameter) options.ignored_parameters = {"local"};
  return options;
}

/// What two ranks save whose buffers, and perhaps one parameter, differ.
std::unique_ptr<MemoryState> saved_with_own(bool own_parameter) {
  std::vector<checkpoint::StateWriter> writers(2);
  on_ranks(2, [&](const Rank& self) {
    Statistics net;
    DistributedDataParallel<Statistics> model(net, self.group, with_own(own_parameter));
    model(at::full({2}, self.rank + 1, at::kDouble)).backward();
    const at::NoGradGuard no_grad;
    if (own_parameter) net->local.fill_(10 + self.rank);
    checkpoint::source_of(model)->save(writers[static_cast<std::size_t>(self.rank)]);
    self.group.barrier();
  });
  return std::make_unique<MemoryState>(writers);
}

TEST(OwnValues, OfEachRankAreSavedAndRestored) {
  const auto state = saved_with_own(true);
  on_ranks(2, [&](const Rank& self) {
    Statistics net;
    DistributedDataParallel<Statistics> model(net, self.group, with_own(true));
    checkpoint::source_of(net)->load(*state);
    EXPECT_EQ(net->seen.item<double>(), 2 * (self.rank + 1));
    EXPECT_EQ(net->local[0].item<double>(), 10 + self.rank);
  });
}

TEST(OwnValues, OfBuffersSuitAnyNumberOfRanksAndThoseOfParametersOnlyTheSame) {
  const auto buffers = saved_with_own(false), parameters = saved_with_own(true);
  on_ranks(3, [&](const Rank& self) {
    Statistics net;
    DistributedDataParallel<Statistics> model(net, self.group, with_own(false));
    checkpoint::source_of(net)->load(*buffers);
    EXPECT_EQ(net->seen.item<double>(), 2 * (self.rank % 2 + 1));
    Statistics other;
    DistributedDataParallel<Statistics> ignoring(other, self.group, with_own(true));
    const std::string error = error_or_none([&] { checkpoint::source_of(other)->load(*parameters); });
    if (self.rank < 2) {
      EXPECT_EQ(error, "");
    } else {
      EXPECT_THAT(error, AllOf(HasSubstr("'local'"), HasSubstr("local.rank0"), HasSubstr("not by rank 2")));
    }
    self.group.barrier();
  });
}

TEST(OwnValues, AreReadByAModuleThatIsNotWrappedYet) {
  const auto buffers = saved_with_own(false), parameters = saved_with_own(true);
  Statistics net;
  checkpoint::source_of(net)->load(*buffers);
  EXPECT_EQ(net->seen.item<double>(), 2);
  EXPECT_THAT(error_or_none([&] { checkpoint::source_of(net)->load(*parameters); }),
              AllOf(HasSubstr("'local'"), HasSubstr("local.rank0"),
                    HasSubstr("not each rank's own in this program")));
  std::vector<checkpoint::StateWriter> one(1);  // such as the rank that gives its state to a replacement
  on_ranks(2, [&](const Rank& self) {
    Statistics wrapped;
    DistributedDataParallel<Statistics> model(wrapped, self.group, with_own(true));
    const at::NoGradGuard no_grad;
    wrapped->local.fill_(7);
    if (self.rank == 1) checkpoint::source_of(wrapped)->save(one[0]);
    self.group.barrier();
  });
  checkpoint::source_of(net)->load(MemoryState(one));
  EXPECT_EQ(net->local[0].item<double>(), 7);
}

TEST(OwnValues, AreThoseOfTheLastWrapperOfAModule) {
  std::vector<checkpoint::StateWriter> writers(2);
  on_ranks(2, [&](const Rank& self) {
    Statistics net;
    { DistributedDataParallel<Statistics> first(net, self.group, with_own(true)); }
    {
      const collective::Group later = self.group.split(0, 1 - self.rank);
      DistributedDataParallel<Statistics> second(net, later, with_own(true));
      checkpoint::StateWriter own;
      checkpoint::source_of(net)->save(own);
      bool found = false;
      for (const auto& one : own.tensors())
        found = found || one.name == "local.rank" + std::to_string(1 - self.rank);
      EXPECT_TRUE(found);
    }
    DistributedDataParallel<Statistics> third(net, self.group);
    checkpoint::source_of(net)->save(writers[static_cast<std::size_t>(self.rank)]);
    self.group.barrier();
  });
  const MemoryState state(writers);
  EXPECT_TRUE(state.tensors().contains("local"));
  EXPECT_TRUE(state.tensors().contains("seen"));
}

TEST(OwnValues, ComeFromAProgramInWhichAllRanksHadTheSame) {
  std::vector<checkpoint::StateWriter> writers(1);
  Statistics whole;
  {
    const at::NoGradGuard no_grad;
    whole->local.fill_(5);
  }
  checkpoint::source_of(whole)->save(writers[0]);
  const MemoryState state(writers);
  on_ranks(2, [&](const Rank& self) {
    Statistics net;
    DistributedDataParallel<Statistics> model(net, self.group, with_own(true));
    checkpoint::source_of(net)->load(state);
    EXPECT_EQ(net->local[2].item<double>(), 5);
  });
}

TEST(OwnValues, OfAnOptimizerAreSavedAndRestored) {
  std::vector<checkpoint::StateWriter> writers(2);
  const auto optimizer_of = [](Statistics& net) { return optim::Optimizer(*net, optim::Adam({.lr = 0.1})); };
  on_ranks(2, [&](const Rank& self) {
    Statistics net;
    DistributedDataParallel<Statistics> model(net, self.group, with_own(true));
    optim::Optimizer optimizer = optimizer_of(net);
    model(at::ones({2}, at::kDouble)).backward();
    {
      const at::NoGradGuard no_grad;
      net->local.mutable_grad().fill_(self.rank + 1);
    }
    // The replicas step equally though their own gradients differ: one norm for all.
    EXPECT_NEAR(optimizer.clip_grad_norm(1e9), std::sqrt(2 * 1 + 3 * 1 + 3 * 4), 1e-12);
    optimizer.step();
    checkpoint::source_of(optimizer)->save(writers[static_cast<std::size_t>(self.rank)]);
    self.group.barrier();
  });
  const MemoryState state(writers);
  on_ranks(2, [&](const Rank& self) {
    Statistics net;
    DistributedDataParallel<Statistics> model(net, self.group, with_own(true));
    optim::Optimizer optimizer = optimizer_of(net);
    checkpoint::source_of(optimizer)->load(state);
    EXPECT_NEAR(optimizer.rule(0).state(1).at("exp_avg")[0].item<double>(), 0.1 * (self.rank + 1), 1e-12);
  });
  Statistics plain;
  optim::Optimizer optimizer = optimizer_of(plain);
  EXPECT_THAT(error_or_none([&] { checkpoint::source_of(optimizer)->load(state); }),
              HasSubstr("not each rank's own in this program"));
}

TEST(TiedNames, WithDifferentValuesAreRefused) {
  struct TiedImpl : nn::Module {
    explicit TiedImpl(bool tied) {
      a = register_module("a", nn::Linear(2, 3));
      b = register_module("b", nn::Linear(2, 3));
      if (tied) b->weight = b->register_parameter("other", a->weight);
    }
    nn::Linear a{nullptr}, b{nullptr};
  };
  const auto plain = std::make_shared<TiedImpl>(false);
  plain->b->register_parameter("other", at::ones({3, 2}));
  const auto tied = std::make_shared<TiedImpl>(true);
  std::vector<checkpoint::StateWriter> writers(1);
  checkpoint::module_source(plain)->save(writers[0]);
  const MemoryState different(writers);
  EXPECT_THAT(error_text([&] { checkpoint::module_source(tied)->load(different); }),
              AllOf(HasSubstr("'a.weight'"), HasSubstr("'b.other'"), HasSubstr("different values")));
  {
    const at::NoGradGuard no_grad;
    plain->a->weight[0][1] = std::numeric_limits<float>::quiet_NaN();
    plain->b->named_parameters()["other"].copy_(plain->a->weight);
  }
  std::vector<checkpoint::StateWriter> equal(1);
  checkpoint::module_source(plain)->save(equal[0]);
  checkpoint::module_source(tied)->load(MemoryState(equal));
  EXPECT_TRUE(tied->a->weight.allclose(plain->a->weight, 0, 0, /*equal_nan=*/true));
}

}  // namespace
}  // namespace torchspan::sharded::divisions_test
