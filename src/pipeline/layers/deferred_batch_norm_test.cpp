// peer: pipe test_deferred_batch_norm `transparency`, `running_stats`, `convert`, `eval`, `optimize`,
//   `conv_bn`, `input_requiring_grad`, `deferred_batch_norm`, `deferred_batch_norm_params`: better: the
//   variance is unbiased, merged without cancellation, correct when layers are reused and when there are
//   fewer micro-batches
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <torchspan/pipeline/deferred_batch_norm.h>

#include "tests/support/pipeline_world.h"

namespace torchspan::pipeline::deferred_batch_norm_test {
namespace {

using torchspan::testing::on_workers;
namespace nn = torch::nn;

at::Tensor seeded(at::IntArrayRef sizes, std::uint64_t seed, at::ScalarType type = at::kDouble) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble).to(type);
}

struct Pair {
  nn::BatchNorm2d plain{nullptr};
  DeferredBatchNorm deferred{nullptr};
};

/// Two norms with equal, unshared parameters.
Pair make_pair(std::int64_t channels, at::ScalarType type = at::kDouble,
               c10::optional<double> momentum = 0.1) {
  nn::BatchNormOptions options(channels);
  options.momentum(momentum);
  Pair pair{nn::BatchNorm2d(options), DeferredBatchNorm(options)};
  pair.plain->to(type);
  pair.deferred->to(type);
  const torch::NoGradGuard guard;
  pair.plain->weight.copy_(seeded({channels}, 100));
  pair.plain->bias.copy_(seeded({channels}, 101));
  pair.deferred->weight.copy_(pair.plain->weight);
  pair.deferred->bias.copy_(pair.plain->bias);
  return pair;
}

/// One use of the layer in one step of a pipeline.
std::vector<at::Tensor> use(DeferredBatchNormImpl& norm, const at::Tensor& input, int chunks, int order = 0) {
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& chunk : input.tensor_split(chunks)) {
    norm.begin_use(order, false);
    outputs.push_back(norm.forward(chunk));
  }
  return outputs;
}

void expect_close(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  EXPECT_TRUE(at::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance)) << a << b;
}

void expect_same_state(const nn::BatchNorm2d& plain, const DeferredBatchNorm& deferred, double tolerance) {
  expect_close(deferred->running_mean, plain->running_mean, tolerance);
  expect_close(deferred->running_var, plain->running_var, tolerance);
  EXPECT_EQ(deferred->num_batches_tracked.item<std::int64_t>(),
            plain->num_batches_tracked.item<std::int64_t>());
}

TEST(DeferredBatchNorm, NormalizesEveryMicroBatchAsBatchNormDoes) {
  for (const int chunks : {1, 4}) {
    Pair pair = make_pair(3);
    const at::Tensor input = seeded({16, 3, 5, 4}, 1), weights = seeded({16, 3, 5, 4}, 2);
    const at::Tensor ours_in = input.clone().set_requires_grad(true);
    const at::Tensor plain_in = input.clone().set_requires_grad(true);
    const at::Tensor ours = at::cat(use(*pair.deferred, ours_in, chunks));
    std::vector<at::Tensor> plain;
    for (const at::Tensor& chunk : plain_in.tensor_split(chunks)) plain.push_back(pair.plain->forward(chunk));
    expect_close(ours, at::cat(plain), 1e-12);
    (ours * weights).sum().backward();
    (at::cat(plain) * weights).sum().backward();
    expect_close(ours_in.grad(), plain_in.grad(), 1e-12);
    expect_close(pair.deferred->weight.grad(), pair.plain->weight.grad(), 1e-12);
    expect_close(pair.deferred->bias.grad(), pair.plain->bias.grad(), 1e-12);
  }
}

TEST(DeferredBatchNorm, GathersTheStatisticsOfTheWholeBatch) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    for (const c10::optional<double> momentum : {c10::optional<double>(0.1), c10::optional<double>()}) {
      for (const int chunks : {1, 2, 3, 4, 7}) {
        SCOPED_TRACE(::testing::Message() << type << ", " << momentum.value_or(-1) << ", " << chunks);
        Pair pair = make_pair(3, type, momentum);
        for (std::uint64_t step = 0; step < 4; ++step) {
          // Few values, so that biased and unbiased variance differ clearly.
          const at::Tensor input = seeded({7, 3, 2, 1}, 10 + step, type);
          use(*pair.deferred, input, chunks);
          pair.deferred->end_step(true);
          pair.plain->forward(input);
          expect_same_state(pair.plain, pair.deferred, type == at::kDouble ? 1e-12 : 1e-6);
        }
      }
    }
  }
}

TEST(DeferredBatchNorm, CommitsAtTheEndOfTheStepAndNotBefore) {
  Pair pair = make_pair(3);
  use(*pair.deferred, seeded({8, 3, 2, 2}, 1), 4);
  EXPECT_EQ(pair.deferred->num_batches_tracked.item<std::int64_t>(), 0);
  EXPECT_TRUE(pair.deferred->running_mean.equal(at::zeros({3}, at::kDouble)));
  pair.deferred->end_step(true);
  EXPECT_EQ(pair.deferred->num_batches_tracked.item<std::int64_t>(), 1);
  pair.deferred->end_step(true);
  EXPECT_EQ(pair.deferred->num_batches_tracked.item<std::int64_t>(), 1) << "a step without it counts nothing";
}

// E[x²] − E[x]² has no correct digits here.
TEST(DeferredBatchNorm, DoesNotCancelForLargeMeans) {
  for (const double mean : {1e4, 1e6}) {
    Pair pair = make_pair(2, at::kFloat);
    const at::Tensor input = (seeded({32, 2, 3, 3}, 5) + mean).to(at::kFloat);
    use(*pair.deferred, input, 4);
    pair.deferred->end_step(true);
    const at::Tensor exact = input.to(at::kDouble);
    const at::Tensor variance = exact.var({0, 2, 3}, true, false);
    expect_close(pair.deferred->running_var, variance * 0.1 + 0.9, 1e-6);
    expect_close(pair.deferred->running_mean, exact.mean(at::IntArrayRef{0, 2, 3}) * 0.1, 1e-6);
  }
}

TEST(DeferredBatchNorm, MergesChunksWhoseMeansAreFarApart) {
  Pair pair = make_pair(2);
  const at::Tensor input =
      seeded({12, 2, 2, 2}, 6) + at::arange(12, at::kDouble).reshape({12, 1, 1, 1}) * 1000;
  use(*pair.deferred, input, 4);
  pair.deferred->end_step(true);
  pair.plain->forward(input);
  expect_same_state(pair.plain, pair.deferred, 1e-12);
}

TEST(DeferredBatchNorm, TakesInputsOfTwoToFiveDimensions) {
  const std::vector<std::vector<std::int64_t>> shapes{{6, 3}, {6, 3, 4}, {6, 3, 4, 2}, {6, 3, 2, 2, 2}};
  for (const auto& shape : shapes) {
    Pair pair = make_pair(3);
    const at::Tensor input = seeded(shape, 9);
    use(*pair.deferred, input, 2);
    pair.deferred->end_step(true);
    const at::Tensor mean = at::zeros({3}, at::kDouble), variance = at::ones({3}, at::kDouble);
    at::batch_norm(input, {}, {}, mean, variance, true, 0.1, 1e-5, false);
    expect_close(pair.deferred->running_mean, mean, 1e-12);
    expect_close(pair.deferred->running_var, variance, 1e-12);
  }
  EXPECT_THROW(make_pair(3).deferred->forward(at::ones({3})), c10::Error);
}

TEST(DeferredBatchNorm, DoesNotCountAForwardThatIsRepeated) {
  Pair pair = make_pair(3);
  const at::Tensor input = seeded({8, 3, 2, 2}, 1);
  use(*pair.deferred, input, 4);
  for (const at::Tensor& chunk : input.tensor_split(4)) {
    pair.deferred->begin_use(0, true);
    pair.deferred->forward(chunk);
  }
  pair.deferred->end_step(true);
  pair.plain->forward(input);
  expect_same_state(pair.plain, pair.deferred, 1e-12);
}

TEST(DeferredBatchNorm, CommitsEveryUseOfASharedLayerInItsOrder) {
  Pair pair = make_pair(3);
  const at::Tensor first = seeded({8, 3, 2, 2}, 1), second = seeded({8, 3, 2, 2}, 2) * 3 + 1;
  const auto a = first.tensor_split(4), b = second.tensor_split(4);
  // As 1F1B may interleave them.
  for (const auto& [order, chunk] :
       std::vector<std::pair<int, int>>{{0, 0}, {0, 1}, {5, 0}, {0, 2}, {5, 1}, {0, 3}, {5, 2}, {5, 3}}) {
    pair.deferred->begin_use(order, false);
    pair.deferred->forward(order == 0 ? a[static_cast<std::size_t>(chunk)]
                                      : b[static_cast<std::size_t>(chunk)]);
  }
  pair.deferred->end_step(true);
  pair.plain->forward(first);
  pair.plain->forward(second);
  expect_same_state(pair.plain, pair.deferred, 1e-12);
}

TEST(DeferredBatchNorm, ForgetsAStepThatFailed) {
  Pair pair = make_pair(3);
  use(*pair.deferred, seeded({8, 3, 2, 2}, 1) * 100, 4);
  pair.deferred->end_step(false);
  const at::Tensor input = seeded({8, 3, 2, 2}, 2);
  use(*pair.deferred, input, 4);
  pair.deferred->end_step(true);
  pair.plain->forward(input);
  expect_same_state(pair.plain, pair.deferred, 1e-12);
}

TEST(DeferredBatchNorm, OutsideAPipelineIsBatchNorm) {
  Pair pair = make_pair(3);
  for (std::uint64_t step = 0; step < 3; ++step) {
    const at::Tensor input = seeded({5, 3, 2, 2}, step);
    expect_close(pair.deferred->forward(input), pair.plain->forward(input), 1e-12);
    expect_same_state(pair.plain, pair.deferred, 1e-12);
  }
}

TEST(DeferredBatchNorm, EvaluatesWithRunningStatisticsAndGathersNothing) {
  Pair pair = make_pair(3);
  const at::Tensor input = seeded({8, 3, 2, 2}, 1);
  use(*pair.deferred, input, 4);
  pair.deferred->end_step(true);
  pair.plain->forward(input);
  pair.deferred->eval();
  pair.plain->eval();
  const at::Tensor other = seeded({8, 3, 2, 2}, 2);
  expect_close(at::cat(use(*pair.deferred, other, 4)), pair.plain->forward(other), 1e-12);
  pair.deferred->end_step(true);
  expect_same_state(pair.plain, pair.deferred, 1e-12);
  EXPECT_EQ(pair.deferred->num_batches_tracked.item<std::int64_t>(), 1);
}

TEST(DeferredBatchNorm, TrainsAsBatchNormDoes) {
  Pair pair = make_pair(3);
  torch::optim::SGD ours(pair.deferred->parameters(), 0.1), plain(pair.plain->parameters(), 0.1);
  for (std::uint64_t step = 0; step < 5; ++step) {
    const at::Tensor input = seeded({8, 3, 2, 2}, step);
    ours.zero_grad();
    plain.zero_grad();
    use(*pair.deferred, input, 1)[0].square().sum().backward();
    pair.deferred->end_step(true);
    pair.plain->forward(input).square().sum().backward();
    ours.step();
    plain.step();
    expect_close(pair.deferred->weight, pair.plain->weight, 1e-12);
    expect_close(pair.deferred->bias, pair.plain->bias, 1e-12);
    expect_same_state(pair.plain, pair.deferred, 1e-12);
  }
}

TEST(DeferredBatchNorm, WithoutRunningStatisticsHasNone) {
  DeferredBatchNorm norm(nn::BatchNormOptions(3).track_running_stats(false));
  norm->to(at::kDouble);
  EXPECT_TRUE(norm->buffers().empty());
  const at::Tensor input = seeded({8, 3}, 1);
  const at::Tensor expected = at::batch_norm(input, {}, {}, {}, {}, true, 0.1, 1e-5, false);
  expect_close(use(*norm, input, 1)[0], expected, 1e-12);
  norm->end_step(true);
  norm->eval();
  expect_close(use(*norm, input, 1)[0], expected, 1e-12);
}

TEST(DeferredBatchNorm, WithoutAffineParametersHasNone) {
  DeferredBatchNorm norm(nn::BatchNormOptions(3).affine(false));
  EXPECT_TRUE(norm->parameters().empty());
  EXPECT_EQ(norm->buffers().size(), 3u);
  EXPECT_EQ(norm->forward(at::ones({2, 3})).size(1), 3);
}

// Conversion.

TEST(ConvertDeferredBatchNorm, SharesParametersAndStatistics) {
  nn::BatchNorm2d plain(nn::BatchNormOptions(3).momentum(0.3).eps(0.25));
  plain->running_mean.fill_(2);
  DeferredBatchNorm converted = convert_deferred_batch_norm(plain);
  EXPECT_TRUE(converted->weight.is_same(plain->weight));
  EXPECT_TRUE(converted->bias.is_same(plain->bias));
  EXPECT_TRUE(converted->running_mean.is_same(plain->running_mean));
  EXPECT_TRUE(converted->running_var.is_same(plain->running_var));
  EXPECT_EQ(converted->options.momentum(), 0.3);
  EXPECT_EQ(converted->options.eps(), 0.25);
  const auto names = [](const nn::Module& module) {
    auto all = module.named_parameters().keys();
    for (auto& name : module.named_buffers().keys()) all.push_back(name);
    return all;
  };
  EXPECT_EQ(names(*converted), names(*plain)) << "so that a state saved of one loads into the other";
  converted->forward(at::ones({2, 3, 2, 2}));
  EXPECT_EQ(plain->num_batches_tracked.item<std::int64_t>(), 1);
}

TEST(ConvertDeferredBatchNorm, KeepsFrozenParametersFrozen) {
  nn::BatchNorm2d plain(3);
  plain->weight.set_requires_grad(false);
  const DeferredBatchNorm converted = convert_deferred_batch_norm(plain);
  EXPECT_FALSE(plain->weight.requires_grad());
  EXPECT_FALSE(converted->weight.requires_grad());
  EXPECT_TRUE(converted->bias.requires_grad());
  nn::Sequential modules(plain, nn::BatchNorm1d(nn::BatchNormOptions(3).affine(false)));
  EXPECT_FALSE(convert_deferred_batch_norm(modules)->parameters()[0].requires_grad());
}

struct NormBlockImpl : nn::Module {
  explicit NormBlockImpl(bool tracks = true) {
    down = register_module(
        "down", nn::Sequential(nn::Conv2d(3, 3, 1),
                               nn::BatchNorm2d(nn::BatchNormOptions(3).track_running_stats(tracks))));
  }
  at::Tensor forward(const at::Tensor& x) { return down->forward(x); }
  nn::Sequential down{nullptr};
};
TORCH_MODULE(NormBlock);

TEST(ConvertDeferredBatchNorm, RefusesNormsInsideBlocksByName) {
  NormBlock block;
  nn::Sequential modules(torch::OrderedDict<std::string, nn::AnyModule>{
      {"conv", nn::AnyModule(nn::Conv2d(3, 3, 1))}, {"block1", nn::AnyModule(block)}});
  try {
    convert_deferred_batch_norm(modules);
    ADD_FAILURE() << "a norm inside a block was left as it is";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("'down.1' of module 'block1'"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("Declare it there as"));
  }
  // As the error says.
  block->down = block->replace_module("down", convert_deferred_batch_norm(block->down));
  EXPECT_EQ(convert_deferred_batch_norm(modules)->ptr(1), block.ptr());
  block->forward(at::ones({2, 3, 2, 2}));
  // Nothing to defer.
  nn::Sequential without(NormBlock(false));
  EXPECT_EQ(convert_deferred_batch_norm(without)->ptr(0), without->ptr(0));
}

TEST(ConvertDeferredBatchNorm, KeepsTheMode) {
  nn::BatchNorm1d plain(3);
  EXPECT_TRUE(convert_deferred_batch_norm(plain)->is_training());
  plain->eval();
  EXPECT_FALSE(convert_deferred_batch_norm(plain)->is_training());
}

TEST(ConvertDeferredBatchNorm, ReplacesThoseOfASequentialAndNothingElse) {
  nn::Sequential modules(
      torch::OrderedDict<std::string, nn::AnyModule>{{"conv", nn::AnyModule(nn::Conv2d(3, 3, 1))},
                                                     {"two", nn::AnyModule(nn::BatchNorm2d(3))},
                                                     {"relu", nn::AnyModule(nn::ReLU())},
                                                     {"one", nn::AnyModule(nn::BatchNorm1d(3))},
                                                     {"three", nn::AnyModule(nn::BatchNorm3d(3))}});
  const nn::Sequential converted = convert_deferred_batch_norm(modules);
  ASSERT_EQ(converted->size(), 5u);
  EXPECT_EQ(converted->named_children().keys(), modules->named_children().keys());
  EXPECT_EQ(converted->ptr(0), modules->ptr(0));
  EXPECT_EQ(converted->ptr(2), modules->ptr(2));
  for (const std::size_t index : {1u, 3u, 4u})
    EXPECT_NE(converted->ptr(index)->as<DeferredBatchNormImpl>(), nullptr) << index;
  EXPECT_EQ(converted->named_parameters().keys(), modules->named_parameters().keys());
}

TEST(ConvertDeferredBatchNorm, LeavesTheModeOfEveryModuleOfASequential) {
  nn::Dropout frozen(0.5);
  nn::BatchNorm1d norm(3);
  nn::Sequential modules(frozen, norm, nn::BatchNorm1d(3));
  frozen->eval();
  norm->eval();
  const nn::Sequential converted = convert_deferred_batch_norm(modules);
  EXPECT_TRUE(converted->is_training());
  EXPECT_FALSE(frozen->is_training()) << "it is shared: a conversion must not switch it";
  EXPECT_FALSE(converted->ptr(1)->is_training());
  EXPECT_TRUE(converted->ptr(2)->is_training());
  modules->eval();
  EXPECT_FALSE(convert_deferred_batch_norm(modules)->is_training());
}

// In a pipeline.

struct ConvNorm {
  explicit ConvNorm(at::ScalarType type = at::kDouble) {
    conv = nn::Conv2d(nn::Conv2dOptions(3, 3, 3).padding(1));
    norm = nn::BatchNorm2d(3);
    conv->to(type);
    norm->to(type);
    const torch::NoGradGuard guard;
    conv->weight.copy_(seeded(conv->weight.sizes(), 11));
    conv->bias.copy_(seeded(conv->bias.sizes(), 12));
  }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm{nullptr};
};

/// conv, norm, conv: the norm is on the second of three stages.
void train_conv_norm(ActivationCheckpoint checkpoint, std::int64_t batch, int micro_batches) {
  SCOPED_TRACE(::testing::Message() << "checkpoint " << static_cast<int>(checkpoint) << ", " << batch
                                    << " rows in " << micro_batches);
  std::vector<at::Tensor> inputs;
  for (std::uint64_t step = 0; step < 3; ++step) inputs.push_back(seeded({batch, 3, 4, 4}, 20 + step));
  const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).square().mean();
  };
  ConvNorm plain;
  for (const at::Tensor& input : inputs) plain.norm->forward(plain.conv->forward(input));
  on_workers(3, 1, [&](Worker& worker) {
    const ConvNorm modules;
    Layers layers;
    layers.add_existing(modules.conv);
    layers.add_existing(convert_deferred_batch_norm(modules.norm));
    layers.add_function("relu", [](const at::Tensor& x) { return at::relu(x); });
    Pipeline pipe(worker, layers, {.micro_batches = micro_batches, .checkpoint = checkpoint});
    for (const at::Tensor& input : inputs) pipe.train_step(input, input, loss);
    if (worker.rank() != 1) return;
    expect_close(modules.norm->running_mean, plain.norm->running_mean, 1e-12);
    expect_close(modules.norm->running_var, plain.norm->running_var, 1e-12);
    EXPECT_EQ(modules.norm->num_batches_tracked.item<std::int64_t>(), 3);
  });
}

TEST(DeferredBatchNorm, InAPipelineHasTheStatisticsOfTheWholeBatchInEveryMode) {
  for (const ActivationCheckpoint checkpoint :
       {ActivationCheckpoint::kNever, ActivationCheckpoint::kExceptLast, ActivationCheckpoint::kAlways}) {
    train_conv_norm(checkpoint, 8, 4);
    train_conv_norm(checkpoint, 7, 4);
  }
}

TEST(DeferredBatchNorm, CommitsThoughThereAreFewerMicroBatchesThanAskedFor) {
  train_conv_norm(ActivationCheckpoint::kExceptLast, 3, 4);
}

TEST(DeferredBatchNorm, OfAFailedStepOfAPipelineCommitsNothing) {
  const at::Tensor input = seeded({8, 3, 4, 4}, 1);
  on_workers(2, 1, [&](Worker& worker) {
    const ConvNorm modules;
    bool fail = true;
    Layers layers;
    layers.add_existing(convert_deferred_batch_norm(modules.norm));
    int calls = 0;
    layers.add_function("fails", [&](const at::Tensor& x) {
      if (fail && ++calls == 3) throw std::runtime_error("fails as configured");
      return x * 1;
    });
    Pipeline pipe(worker, layers, {.micro_batches = 4, .checkpoint = ActivationCheckpoint::kNever});
    const auto loss = [](const at::Tensor& output, const at::Tensor&) { return output.square().mean(); };
    EXPECT_THROW(pipe.train_step(input, input, loss), Error);
    EXPECT_EQ(modules.norm->num_batches_tracked.item<std::int64_t>(), 0);
    fail = false;
    pipe.train_step(input, input, loss);
    if (worker.rank() != 0) return;
    ConvNorm plain;
    plain.norm->forward(input);
    expect_close(modules.norm->running_mean, plain.norm->running_mean, 1e-12);
    expect_close(modules.norm->running_var, plain.norm->running_var, 1e-12);
  });
}

TEST(DeferredBatchNorm, NestedInAModuleIsFoundByThePipeline) {
  struct Block : nn::Module {
    Block() {
      norm = register_module("norm", DeferredBatchNorm(nn::BatchNormOptions(3)));
      norm->to(at::kDouble);
    }
    at::Tensor forward(const at::Tensor& x) { return norm->forward(x); }
    DeferredBatchNorm norm{nullptr};
  };
  const at::Tensor input = seeded({8, 3}, 1);
  on_workers(1, 1, [&](Worker& worker) {
    const auto block = std::make_shared<Block>();
    Layers layers;
    layers.add_existing(block);
    Pipeline pipe(worker, layers, {.micro_batches = 4});
    pipe.train_step(input, input, [](const at::Tensor& y, const at::Tensor&) { return y.square().mean(); });
    nn::BatchNorm1d plain(3);
    plain->to(at::kDouble);
    plain->forward(input);
    EXPECT_EQ(block->norm->num_batches_tracked.item<std::int64_t>(), 1);
    expect_close(block->norm->running_var, plain->running_var, 1e-12);
  });
}

}  // namespace
}  // namespace torchspan::pipeline::deferred_batch_norm_test
