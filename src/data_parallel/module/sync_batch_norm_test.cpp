#include <gtest/gtest.h>
#include <numeric>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>
#include <torchspan/data_parallel/sync_batch_norm.h>

#include "data_parallel/api/group_ranks.h"
#include "data_parallel/toy_model.h"
#include "state/api/place.h"

namespace torchspan::data_parallel::sync_batch_norm_test {
namespace {

using namespace testing;
namespace nn = torch::nn;

/// Returns the same values on all ranks and threads.
at::Tensor values(at::IntArrayRef sizes, double seed, at::ScalarType dtype = at::kDouble) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::arange(count, at::kDouble).mul(0.73).add(seed).sin().mul(2).add(0.5).reshape(sizes).to(dtype);
}

/// The rows of one rank, of a batch that is split into parts of these sizes.
at::Tensor part_of(const at::Tensor& whole, const std::vector<std::int64_t>& sizes, int rank) {
  const std::int64_t before = std::accumulate(sizes.begin(), sizes.begin() + rank, std::int64_t{0});
  return whole.narrow(0, before, sizes[static_cast<std::size_t>(rank)]);
}

/// LibTorch's batch norm for tensors with this number of dimensions.
struct Plain {
  explicit Plain(const nn::BatchNormOptions& options) : one(options), two(options), three(options) {}
  at::Tensor operator()(const at::Tensor& x) {
    if (x.dim() == 5) return three(x);
    return x.dim() == 4 ? two(x) : one(x);
  }
  void each(const std::function<void(nn::Module&)>& f) { f(*one), f(*two), f(*three); }
  nn::BatchNorm1d one;
  nn::BatchNorm2d two;
  nn::BatchNorm3d three;
};

template <class Norm>
void set_parameters(Norm& norm) {
  const at::NoGradGuard no_grad;
  if (!norm.weight.defined()) return;
  norm.weight.copy_(values(norm.weight.sizes(), 3));
  norm.bias.copy_(values(norm.bias.sizes(), 4));
}

/// One random case.
struct Case {
  explicit Case(unsigned seed) {
    std::mt19937 random(seed);
    dtype = seed % 2 ? at::kDouble : at::kFloat;
    features = 1 + static_cast<std::int64_t>(random() % 5);
    const int ranks = 1 + static_cast<int>(random() % 4);
    for (int rank = 0; rank < ranks; ++rank) parts.push_back(static_cast<std::int64_t>(random() % 4));
    parts[random() % parts.size()] += 2;
    sizes = {std::accumulate(parts.begin(), parts.end(), std::int64_t{0}), features};
    for (unsigned extra = random() % 4; extra > 0; --extra)
      sizes.push_back(1 + static_cast<std::int64_t>(random() % 3));
    options.affine(random() % 4 != 0);
    options.track_running_stats(random() % 4 != 0);
    if (random() % 3 == 0) options.momentum(c10::nullopt);
    channels_last = sizes.size() == 4 && random() % 2 == 0;
  }
  int ranks() const { return static_cast<int>(parts.size()); }
  at::Tensor input(int step) const {
    at::Tensor x = values(sizes, step, dtype);
    return channels_last ? x.contiguous(at::MemoryFormat::ChannelsLast) : x;
  }

  std::int64_t features = 1;
  nn::BatchNormOptions options{features};
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> parts, sizes;
  bool channels_last = false;
};

/// Three steps of one case: on `self` with its part, and with LibTorch on the whole batch.
void compare_with_one_process(const Rank& self, const Case& given) {
  nn::BatchNormOptions options = given.options;
  options.num_features(given.features);
  SyncBatchNorm norm(options);
  norm->set_group(self.group);
  Plain plain(options);
  plain.each([&](nn::Module& module) { module.to(given.dtype); });
  norm->to(given.dtype);
  set_parameters(*norm);
  set_parameters(*plain.one), set_parameters(*plain.two), set_parameters(*plain.three);
  const double close = tolerance(given.dtype);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor whole = given.input(step).requires_grad_();
    const at::Tensor mine = part_of(whole.detach(), given.parts, self.rank).clone().requires_grad_();
    const at::Tensor factors = values(given.sizes, 10 + step, given.dtype);
    const at::Tensor wanted = plain(whole), got = norm(mine);
    expect_close(got.detach(), part_of(wanted.detach(), given.parts, self.rank), close);
    EXPECT_EQ(got.strides(), mine.strides());
    (wanted * factors).sin().sum().backward();
    (got * part_of(factors, given.parts, self.rank)).sin().sum().backward();
    expect_close(mine.grad(), part_of(whole.grad(), given.parts, self.rank), close);
  }
  const auto compare = [&](const auto& theirs) {
    if (theirs->weight.defined()) {
      expect_close(self.group.all_reduce(norm->weight.grad()).wait(), theirs->weight.grad(), 4 * close);
      expect_close(self.group.all_reduce(norm->bias.grad()).wait(), theirs->bias.grad(), 4 * close);
    }
    ASSERT_EQ(norm->running_mean.defined(), theirs->running_mean.defined());
    if (!theirs->running_mean.defined()) return;
    expect_close(norm->running_mean, theirs->running_mean, close);
    expect_close(norm->running_var, theirs->running_var, close);
    EXPECT_TRUE(at::equal(norm->num_batches_tracked, theirs->num_batches_tracked));
  };
  given.sizes.size() == 5   ? compare(plain.three)
  : given.sizes.size() == 4 ? compare(plain.two)
                            : compare(plain.one);
}

// peer: ddp DistributedDataParallel_SyncBatchNorm, _Channels_Last, _No_Affine, _2D_Input,
//   _Diff_Input_Sizes_Running_Value, _Diff_Input_Sizes_gradient: better: on CPU too; 1e-6 in float, 1e-12
//   in double
// peer: ddp sync_batch_norm_empty_input
TEST(SyncBatchNorm, IsABatchNormOfTheWholeBatchWhateverItsPartsAre) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const Case given(seed);
    on_ranks(
        given.ranks(), [&](const Rank& self) { compare_with_one_process(self, given); }, seed);
  }
}

/// A net with a batch norm that the converter replaces, and a SyncBatchNorm that it keeps.
struct NetImpl : nn::Module {
  NetImpl()
      : first(register_module("first", nn::Sequential(nn::Conv2d(2, 3, 1), nn::BatchNorm2d(3), nn::ReLU()))),
        second(register_module("second", SyncBatchNorm(nn::BatchNormOptions(3)))),
        last(register_module("last", nn::Linear(3, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return last(second(first->forward(x)).mean({2, 3})); }
  nn::Sequential first;
  SyncBatchNorm second;
  nn::Linear last;
};
TORCH_MODULE(Net);

void fill(nn::Module& module) {
  const at::NoGradGuard no_grad;
  double seed = 0;
  for (auto& parameter : module.parameters()) parameter.copy_(values(parameter.sizes(), seed += 1));
}

/// A loss that is a sum over rows, so that the losses of all parts add up to that of the whole batch.
at::Tensor loss_of(const at::Tensor& output) { return output.pow(2).sum(); }

// peer: ddp DistributedDataParallel_SyncBatchNorm
// peer: ddp (documented) another collective in the model's forward and backward: better: the buckets have a
//   separate group, so other collectives do not affect their order
TEST(SyncBatchNorm, UnderDistributedDataParallelTrainsAsOneProcessOnTheWholeBatch) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const std::vector<std::int64_t> parts{4, 1, 0, 2};
    on_ranks(4, [&](const Rank& self) {
      Net whole, mine;
      fill(*whole), fill(*mine);
      whole->to(dtype), mine->to(dtype);
      torch::optim::SGD oracle(whole->parameters(), 0.01), optimizer(mine->parameters(), 0.01);
      EXPECT_EQ(convert_sync_batch_norm(*mine, self.group), 2U);
      DistributedDataParallel model(mine, self.group, {.bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
      for (int step = 0; step < 5; ++step) {
        const at::Tensor input = values({7, 2, 3, 2}, step, dtype);
        oracle.zero_grad(), optimizer.zero_grad();
        loss_of(whole(input)).backward();
        (loss_of(model(part_of(input, parts, self.rank))) * self.size).backward();
        oracle.step(), optimizer.step();
      }
      const auto theirs = whole->named_parameters(), ours = mine->named_parameters();
      for (const auto& item : theirs)
        expect_close(ours[item.key()].detach(), item.value().detach(), 10 * tolerance(dtype));
      const auto buffers = mine->named_buffers();
      for (const auto& item : whole->named_buffers())
        expect_close(buffers[item.key()], item.value(), 10 * tolerance(dtype));
      mine->eval(), whole->eval();
      const at::NoGradGuard no_grad;
      const at::Tensor input = values({7, 2, 3, 2}, 9, dtype);
      expect_close(mine(input), whole(input), 10 * tolerance(dtype));
    });
  }
}

// peer: ddp sync_batch_norm_empty_input, _only_empty_input: same
TEST(SyncBatchNorm, OfEmptyBatchesEverywhereGivesNothingAndZeros) {
  on_ranks(2, [](const Rank& self) {
    SyncBatchNorm norm(nn::BatchNormOptions(2));
    norm->set_group(self.group);
    DistributedDataParallel model(norm, self.group);
    const at::Tensor input = at::empty({0, 2, 3}).requires_grad_();
    const at::Tensor output = model(input);
    EXPECT_EQ(output.sizes(), input.sizes());
    output.sum().backward();
    EXPECT_EQ(input.grad().sizes(), input.sizes());
    EXPECT_TRUE(at::equal(norm->weight.grad(), at::zeros({2})));
    EXPECT_TRUE(at::equal(norm->running_var, at::ones({2})));
    EXPECT_EQ(norm->num_batches_tracked.item<int>(), 0);
  });
}

// peer: ddp DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process: same
TEST(SyncBatchNorm, AcceptsOneRowPerRankButNotOneInTotal) {
  on_ranks(2, [](const Rank& self) {
    SyncBatchNorm norm(nn::BatchNormOptions(2));
    norm->set_group(self.group);
    nn::BatchNorm1d plain(2);
    const at::Tensor whole = values({2, 2}, 1, at::kFloat);
    expect_close(norm(whole.narrow(0, self.rank, 1)).detach(), plain(whole).narrow(0, self.rank, 1).detach(),
                 1e-6);
    const std::string text = error_text([&] { norm(whole.narrow(0, 0, self.rank)); });
    EXPECT_NE(text.find("one value per feature"), std::string::npos) << text;
  });
}

// peer: ddp ddp_sync_bn_training_vs_eval: same
TEST(SyncBatchNorm, InEvaluationIsPlainAndSendsNothing) {
  on_ranks(2, [](const Rank& self) {
    SyncBatchNorm norm(nn::BatchNormOptions(3));
    norm->set_group(self.group);
    norm(values({4, 3}, self.rank, at::kFloat));
    nn::BatchNorm1d plain(3);
    plain->running_mean.copy_(norm->running_mean);
    plain->running_var.copy_(norm->running_var);
    norm->eval(), plain->eval();
    if (self.rank == 1) {  // on this rank only: would hang if it communicated
      const at::Tensor input = values({1, 3}, 7, at::kFloat).requires_grad_();
      EXPECT_TRUE(at::equal(norm(input), plain(input)));
      norm(input).sum().backward();
    }
  });
}

// peer: ddp SyncBatchNorm_process_group: same
TEST(SyncBatchNorm, UsesTheRanksOfItsGroupOnly) {
  on_ranks(4, [](const Rank& self) {
    const collective::Group pair = self.group.split(self.rank / 2, self.rank);
    SyncBatchNorm norm(nn::BatchNormOptions(2));
    norm->set_group(pair);
    nn::BatchNorm1d plain(2);
    const at::Tensor whole = values({8, 2}, 1, at::kFloat);
    plain(whole.narrow(0, 4 * (self.rank / 2), 4));
    norm(whole.narrow(0, 2 * self.rank, 2));
    expect_close(norm->running_mean, plain->running_mean, 1e-6);
  });
}

// peer: ddp half and bfloat16 inputs: same
TEST(SyncBatchNorm, TakesAndReturnsHalfTensors) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    on_ranks(2, [&](const Rank& self) {
      SyncBatchNorm norm(nn::BatchNormOptions(2));
      norm->set_group(self.group);
      nn::BatchNorm1d plain(2);
      const at::Tensor whole = values({6, 2}, 1, dtype), factors = values({6, 2}, 2, at::kFloat);
      const at::Tensor mine = whole.narrow(0, 3 * self.rank, 3).clone().requires_grad_();
      const at::Tensor wide = whole.to(at::kFloat).requires_grad_();
      const at::Tensor got = norm(mine);
      EXPECT_EQ(got.scalar_type(), dtype);
      expect_close(got.detach(), plain(wide).detach().narrow(0, 3 * self.rank, 3), 2e-2);
      (got.to(at::kFloat) * factors.narrow(0, 3 * self.rank, 3)).sum().backward();
      (plain(wide) * factors).sum().backward();
      EXPECT_EQ(mine.grad().scalar_type(), dtype);
      expect_close(mine.grad(), wide.grad().narrow(0, 3 * self.rank, 3), 2e-2);
    });
  }
}

/// The other ranks need this rank's sums, although it does not need theirs.
// peer: ddp (documented) ranks whose SyncBatchNorms differ
TEST(SyncBatchNorm, TakesPartWhereARanksInputNeedsNoGradient) {
  on_ranks(2, [](const Rank& self) {
    SyncBatchNorm norm(nn::BatchNormOptions(2));
    norm->set_group(self.group);
    nn::BatchNorm1d plain(2);
    const at::Tensor whole = values({4, 2}, 1, at::kFloat).requires_grad_();
    const at::Tensor mine = whole.detach().narrow(0, 2 * self.rank, 2).clone().requires_grad_(self.rank == 0);
    norm(mine).pow(3).sum().backward();
    plain(whole).pow(3).sum().backward();
    if (self.rank == 0) expect_close(mine.grad(), whole.grad().narrow(0, 0, 2), 1e-5);
  });
}

// peer: ddp (documented) second derivatives, two backwards: differs: second derivatives are refused
TEST(SyncBatchNorm, MayRunBackwardTwiceAndReportsUnsupportedDerivatives) {
  on_ranks(2, [](const Rank& self) {
    SyncBatchNorm norm(nn::BatchNormOptions(2));
    norm->set_group(self.group);
    const at::Tensor mine = values({3, 2}, self.rank, at::kFloat).requires_grad_();
    const at::Tensor loss = norm(mine).pow(2).sum(), other = norm(mine * 2).pow(3).sum();
    loss.backward({}, /*retain_graph=*/true);
    const at::Tensor once = norm->weight.grad().clone();
    loss.backward();
    expect_close(norm->weight.grad(), once * 2, 1e-6);
    EXPECT_THROW(loss.backward(), c10::Error) << "the graph was freed";
    const std::string text =
        error_text([&] { other.backward({}, /*retain_graph=*/true, /*create_graph=*/true); });
    EXPECT_NE(text.find("second derivatives"), std::string::npos) << text;
    at::Tensor input = mine * 1;
    const at::Tensor output = norm(input);
    input.mul_(2);
    EXPECT_THROW(output.sum().backward(), c10::Error) << "the input was changed since";
  });
}

// peer: ddp (documented) ranks whose SyncBatchNorms differ
TEST(SyncBatchNorm, RejectsInvalidInputs) {
  SyncBatchNorm norm(nn::BatchNormOptions(2));
  const auto refused = [&](const at::Tensor& input) { return error_text([&] { norm(input); }); };
  EXPECT_NE(refused(at::ones({4})).find("[4]; it takes [batch, 2, ...]"), std::string::npos);
  EXPECT_NE(refused(at::ones({4, 3})).find("SyncBatchNorm of 2 features got Float [4, 3]"),
            std::string::npos);
  EXPECT_NE(refused(at::ones({4, 2}, at::kLong)).find("real floats"), std::string::npos);
}

// peer: ddp (documented) ranks whose SyncBatchNorms differ: better: the error names the ranks; no hang
TEST(SyncBatchNorm, NamesRanksWhoseFeaturesDiffer) {
  on_ranks(2, [](const Rank& self) {
    SyncBatchNorm norm(nn::BatchNormOptions(2 + self.rank));
    norm->set_group(self.group);
    const std::string text = error_text([&] { norm(at::ones({4, 2 + self.rank})); });
    EXPECT_NE(text.find("2 features on rank 0 and 3 on rank 1"), std::string::npos) << text;
  });
}

// peer: ddp convert_sync_batchnorm
TEST(SyncBatchNorm, HasTheNamesOfABatchNormInCheckpointsAndClones) {
  SyncBatchNorm norm(nn::BatchNormOptions(3));
  nn::BatchNorm2d plain(3);
  set_parameters(*plain);
  plain->running_mean.fill_(5);
  std::stringstream file;
  torch::save(plain, file);
  torch::load(norm, file);
  EXPECT_TRUE(at::equal(norm->running_mean, plain->running_mean));
  EXPECT_TRUE(at::equal(norm->weight, plain->weight));
  const auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone());
  ASSERT_TRUE(copy);
  EXPECT_TRUE(at::equal(copy->weight, plain->weight));
  EXPECT_NE(copy->weight.unsafeGetTensorImpl(), norm->weight.unsafeGetTensorImpl());
}

// peer: ddp `convert_sync_batchnorm`: names, tensors, nesting: differs: replaces in a Sequential only; a
//   class must declare its member as SyncBatchNorm
TEST(ConvertSyncBatchNorm, KeepsTensorsNamesModesAndOptions) {
  on_ranks(2, [](const Rank& self) {
    nn::BatchNorm1d norm(nn::BatchNormOptions(3).eps(0.25).momentum(0.5));
    norm->eval();
    norm->weight.set_requires_grad(false);
    nn::Sequential inner(nn::Linear(3, 3), norm);
    const auto net = std::make_shared<nn::Module>();
    net->register_module("inner", inner.ptr());
    net->register_module("head", nn::Linear(3, 3).ptr());
    const auto before = net->named_parameters();
    convert_sync_batch_norm(*net, self.group);
    const auto after = net->named_parameters();
    EXPECT_EQ(before.keys(), after.keys());
    for (const auto& item : before)
      EXPECT_EQ(item.value().unsafeGetTensorImpl(), after[item.key()].unsafeGetTensorImpl()) << item.key();
    const auto made = inner->ptr<SyncBatchNormImpl>(1);
    EXPECT_EQ(made->options.eps(), 0.25);
    EXPECT_FALSE(made->is_training());
    EXPECT_FALSE(made->weight.requires_grad());
    EXPECT_EQ(made->running_mean.unsafeGetTensorImpl(), norm->running_mean.unsafeGetTensorImpl());
    EXPECT_EQ(made->group()->size(), 2);
    made->train();
    inner->forward(values({1 + self.rank, 3}, self.rank, at::kFloat));
    EXPECT_EQ(made->num_batches_tracked.item<int>(), 1);
    EXPECT_EQ(inner->modules(false)[1].get(), made.get()) << "the module's registry has it, too";
  });
}

// peer: ddp convert_sync_batchnorm
TEST(ConvertSyncBatchNorm, NamesModulesItCannotReplaceAndChangesNothing) {
  struct Block : nn::Module {
    Block() : norm(register_module("norm", nn::BatchNorm2d(3))) {}
    nn::BatchNorm2d norm;
  };
  on_ranks(2, [](const Rank& self) {
    auto net = std::make_shared<nn::Module>();
    nn::Sequential good(nn::BatchNorm1d(3));
    net->register_module("good", good.ptr());
    if (self.rank == 1) net->register_module("block", std::make_shared<Block>());
    const std::string text = error_text([&] { convert_sync_batch_norm(*net, self.group); });
    EXPECT_NE(text.find("rank 1 cannot begin: 'block.norm' is a class member of type BatchNorm"),
              std::string::npos)
        << text;
    EXPECT_NE(dynamic_cast<nn::BatchNorm1dImpl*>(good->ptr(0).get()), nullptr);
    const std::string alone = error_text([&] { convert_sync_batch_norm(*nn::BatchNorm1d(2), self.group); });
    EXPECT_NE(alone.find("itself a BatchNorm"), std::string::npos) << alone;
  });
}

// peer: ddp convert_sync_batchnorm
TEST(ConvertSyncBatchNorm, NamesTheBatchNormThatDiffersBetweenRanks) {
  on_ranks(2, [](const Rank& self) {
    const auto refused = [&](nn::Sequential net) {
      return error_text([&] { convert_sync_batch_norm(*net, self.group); });
    };
    const std::string options =
        refused(nn::Sequential(nn::BatchNorm1d(nn::BatchNormOptions(3).eps(self.rank == 0 ? 0.5 : 0.25))));
    EXPECT_NE(options.find("'0' is a batch norm of 3 features, eps 0.5"), std::string::npos) << options;
    nn::Sequential net(nn::BatchNorm1d(3));
    if (self.rank == 1) net->push_back(nn::BatchNorm1d(3));
    const std::string count = refused(net);
    EXPECT_NE(count.find("rank 0 has 1 batch norms, rank 1 has 2"), std::string::npos) << count;
  });
}

TEST(SyncBatchNorm, RefusesRanksThatHaveDifferentFeatures) {
  on_ranks(2, [](const Rank& self) {
    nn::BatchNorm1d norm(2);
    state::set_place(norm->weight, std::make_shared<state::Place>(state::part_of(
                                       {4}, {2 * self.rank}, {2},
                                       data_parallel::ranks_of(self.group, state::kTensorParallel))));
    nn::Sequential net(norm);
    const std::string text = error_text([&] { convert_sync_batch_norm(*net, self.group); });
    EXPECT_NE(text.find("elements [0:2] of [4] on rank 0"), std::string::npos) << text;
    EXPECT_NE(text.find("use a group of the ranks that have the same part"), std::string::npos) << text;
    const collective::Group alone = self.group.split(self.rank, 0);
    EXPECT_EQ(convert_sync_batch_norm(*net, alone), 1U);
  });
}

// peer: ddp ddp_uneven_inputs_stop_iteration_sync_bn: same; without `throw_on_early_termination`, it is
//   rejected with the module's name
TEST(SyncBatchNorm, InAJoinNeedsAnEarlyEnd) {
  on_ranks(2, [](const Rank& self) {
    nn::Sequential net(nn::Linear(2, 2), nn::BatchNorm1d(2));
    convert_sync_batch_norm(*net, self.group);
    DistributedDataParallel model(net, self.group);
    const auto train = [&] {
      for (int i = 0; i < 2 + self.rank; ++i) model.forward(values({3, 2}, i, at::kFloat)).sum().backward();
    };
    const std::string text = error_text([&] { model.join(train); });
    EXPECT_NE(text.find("'1', a SyncBatchNorm"), std::string::npos) << text;
    const std::string end = error_text([&] { model.join(train, {.throw_on_early_termination = true}); });
    EXPECT_NE(end.find("rank 0 has run out of batches"), std::string::npos) << end;
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::sync_batch_norm_test
