#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/grad_scaler.h>
#include <torchspan/sharded.h>

#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::mixed_precision_test {
namespace {

using ::testing::HasSubstr;
using testing::kWidth;
using testing::values;
using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(double seed) {
    weight = register_parameter("weight", values({kWidth, kWidth}, seed).to(at::kFloat));
    bias = register_parameter("bias", values({kWidth}, seed + 1).to(at::kFloat));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen = {weight.scalar_type(), x.scalar_type()};
    return at::tanh(at::linear(x, weight, bias));
  }
  at::Tensor weight, bias;
  std::vector<at::ScalarType> seen;
};
TORCH_MODULE(Layer);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 2; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), Sharded<Layer>(3 * i)));
    head = register_parameter("head", values({kWidth, 2}, 9).to(at::kFloat));
  }
  at::Tensor forward(at::Tensor x, const at::Tensor& places) {
    seen = {x.scalar_type(), places.scalar_type()};
    for (auto& layer : layers) x = layer->forward(x);
    return at::matmul(x, head).index_select(0, places);
  }
  std::vector<Sharded<Layer>> layers;
  at::Tensor head;
  std::vector<at::ScalarType> seen;
};
TORCH_MODULE(Net);

at::Tensor input(int rank, int step) { return values({3, kWidth}, rank + 0.4 * step).to(at::kFloat); }
at::Tensor places() { return at::arange(3); }

/// The same computation in one process, with casts that autograd sees.
at::Tensor with_casts(Net& net, const at::Tensor& x, at::ScalarType dtype) {
  at::Tensor y = x.to(dtype);
  for (auto& layer : net->layers) y = at::tanh(at::linear(y, layer->weight.to(dtype), layer->bias.to(dtype)));
  return at::matmul(y, net->head.to(dtype)).to(at::kFloat);
}

constexpr MixedPrecision kBfloat{.param_dtype = at::kBFloat16, .output_dtype = at::kFloat};

TEST(MixedPrecision, TrainsAfterAForwardInInferenceMode) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group, {.precision = kBfloat});
    {
      const c10::InferenceMode inference;
      model(input(self.rank, 0), places());
    }
    for (int step = 0; step < 2; ++step) model(input(self.rank, step), places()).sum().backward();
    EXPECT_TRUE(net->head.grad().defined());
  });
}

// peer: fsdp test_compute_dtype: same: bfloat16 in units, float32 for parameters, reductions and the optimizer
// peer: fsdp test_grad_acc_with_reduce_dtype: same
TEST(MixedPrecision, StepsAreThoseOfCastsInOneProcess) {
  for (const int size : {1, 2, 4}) {
    for (const std::size_t alone : {std::size_t{1}, std::size_t{1} << 20}) {
      Net wanted;
      optim::Optimizer reference(*wanted, optim::SGD({.lr = 0.2, .momentum = 0.9}));
      for (int step = 0; step < 6; ++step) {
        for (int rank = 0; rank < size; ++rank)
          (with_casts(wanted, input(rank, step), at::kBFloat16).pow(2).sum() / size).backward();
        if (step % 2 == 0) continue;
        reference.step();
        reference.zero_grad();
      }
      on_ranks(size, [&](const Rank& self) {
        Net net;
        FullyShardedDataParallel<Net> model(net, self.group, {.alone_bytes = alone, .precision = kBfloat});
        optim::Optimizer sgd(*net, optim::SGD({.lr = 0.2, .momentum = 0.9}));
        for (int step = 0; step < 6; ++step) {
          const auto pass = [&] { model(input(self.rank, step), places()).pow(2).sum().backward(); };
          if (step % 2 == 0) {
            const auto local = model.no_sync();
            pass();
            continue;
          }
          pass();
          for (const auto& parameter : net->parameters()) {
            EXPECT_EQ(parameter.scalar_type(), at::kFloat);
            if (parameter.grad().defined()) {
              EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
            }
          }
          sgd.step();
          sgd.zero_grad();
        }
        model.with_full_parameters([&] {
          const auto expected = wanted->named_parameters();
          for (const auto& item : net->named_parameters()) {
            EXPECT_EQ(item.value().scalar_type(), at::kFloat);
            EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 1e-5, 1e-6)) << item.key();
          }
        });
      });
    }
  }
}

TEST(MixedPrecision, UnitsSeeCastParametersAndInputs) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group, {.precision = kBfloat});
    at::Tensor x = input(self.rank, 0).requires_grad_();
    const at::Tensor y = model(x, places());
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_EQ(net->seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kLong}));
    EXPECT_EQ(net->layers[1]->seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16}));
    y.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  });
  on_ranks(1, [&](const Rank& self) {
    Net net;
    MixedPrecision precision = kBfloat;
    precision.cast_forward_inputs = false;
    FullyShardedDataParallel<Net> model(net, self.group, {.precision = precision});
    EXPECT_ANY_THROW(model(input(0, 0), places()));  // the dtypes of the input and the weight differ
    EXPECT_EQ(net->layers[0]->seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kFloat}));
  });
}

struct ScaleImpl : torch::nn::Module {
  ScaleImpl() { weight = register_parameter("weight", at::ones({2})); }
  at::Tensor forward(const at::Tensor& x) { return weight * x; }
  at::Tensor weight;
};

// peer: fsdp test_reduce_dtype: same
TEST(MixedPrecision, ReductionsHaveTheirDtype) {
  on_ranks(2, [&](const Rank& self) {
    for (const bool narrow : {false, true}) {
      FullyShardedOptions options;
      if (narrow) options.precision.reduce_dtype = at::kBFloat16;
      auto scale = std::make_shared<ScaleImpl>();
      FullyShardedDataParallel<std::shared_ptr<ScaleImpl>> scaled(scale, self.group, options);
      // The average of 256 and 1 needs 9 bits; bfloat16 has 8.
      scaled(at::full({2}, self.rank == 0 ? 256.0F : 1.0F)).sum().backward();
      EXPECT_EQ(scale->weight.grad().scalar_type(), at::kFloat);
      EXPECT_EQ(scale->weight.grad()[0].item<double>(), narrow ? 128 : 128.5) << self.rank;
    }
  });
}

TEST(MixedPrecision, WholeParametersKeepTheirPrecisionAndChanges) {
  on_ranks(2, [&](const Rank& self) {
    Net net, before;
    FullyShardedDataParallel<Net> model(net, self.group, {.precision = kBfloat});
    model.with_full_parameters([&] {
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(net->layers[0]->weight, before->layers[0]->weight));
      net->layers[0]->weight.add_(1e-6);
    });
    EXPECT_EQ(net->layers[0]->weight.dim(), 1);
    model.with_full_parameters(
        [&] { EXPECT_TRUE(at::equal(net->layers[0]->weight, before->layers[0]->weight.detach() + 1e-6)); });
    EXPECT_THAT(
        error_text([&] { model.with_full_parameters([&] { model(input(self.rank, 0), places()); }); }),
        HasSubstr("mixed precision policy"));
  });
}

// peer: fsdp test_gradient_scaler: same
TEST(MixedPrecision, AScalerSkipsAStepOnAllRanksIfAGradientOfOneRankOverflows) {
  on_ranks(3, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group, {.precision = kBfloat});
    optim::Optimizer sgd(*net, optim::SGD({.lr = 0.1}));
    optim::GradScaler scaler(
        {.init_scale = 8, .agree = [&](bool found) { return model.on_any_rank(found); }});
    for (const bool overflows : {true, false}) {
      scaler.scale(model(input(self.rank, 0), places()).sum()).backward();
      if (overflows && self.rank == 1) net->head.mutable_grad().fill_(std::numeric_limits<float>::infinity());
      EXPECT_EQ(scaler.step(sgd), !overflows);
      scaler.update();
      sgd.zero_grad();
      EXPECT_EQ(scaler.get_scale(), 4);
    }
  });
}

TEST(MixedPrecision, WrongOrDifferentPoliciesAreNamed) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    EXPECT_THAT(error_text([&] {
                  FullyShardedDataParallel<Net>(net, self.group, {.precision = {.param_dtype = at::kInt}});
                }),
                HasSubstr("floating-point"));
    MixedPrecision mine;
    if (self.rank == 0) mine.param_dtype = at::kBFloat16;
    EXPECT_THAT(error_text([&] { FullyShardedDataParallel<Net>(net, self.group, {.precision = mine}); }),
                HasSubstr("param_dtype"));
  });
}

TEST(MixedPrecision, ContainersOfTensorsAreCastAndOtherInputsAreNot) {
  const std::optional<at::ScalarType> dtype = at::kBFloat16;
  const std::vector<at::Tensor> list{at::ones({1}), at::ones({1}, at::kLong), at::Tensor()};
  const std::vector<at::Tensor> cast = cast_input<const std::vector<at::Tensor>&>(list, dtype);
  EXPECT_EQ(cast[0].scalar_type(), at::kBFloat16);
  EXPECT_EQ(cast[1].scalar_type(), at::kLong);
  EXPECT_FALSE(cast[2].defined());
  EXPECT_EQ(list[0].scalar_type(), at::kFloat);
  at::Tensor changed = at::ones({1});
  EXPECT_EQ(&cast_input<at::Tensor&>(changed, dtype), &changed);
  EXPECT_EQ(changed.scalar_type(), at::kFloat);
  auto only = std::make_unique<int>(3);
  EXPECT_EQ(*cast_input<std::unique_ptr<int>>(only, dtype), 3);
  EXPECT_EQ(cast_input<at::Tensor>(changed, std::nullopt).scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace torchspan::sharded::mixed_precision_test
