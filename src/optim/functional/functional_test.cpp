#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/functional.h>

#include "tests/support/errors.h"

namespace torchspan::optim::functional_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::error_of;

at::Tensor parameter(at::IntArrayRef shape) {
  return torch::ones(shape, torch::kFloat64).set_requires_grad(true);
}

TEST(FunctionalOptimizer, RefusesListsItCannotOptimizeNamingTheParameter) {
  const SGD sgd{.lr = 0.1};
  EXPECT_THAT(error_of([&] {
                sgd.build({parameter({2}), at::Tensor()});
              }).what(),
              HasSubstr("parameter 1 is undefined"));
  EXPECT_THAT(error_of([&] { sgd.build({parameter({2}) * 2}); }).what(), HasSubstr("parameter 0"));
  const at::Tensor shared = parameter({2});
  EXPECT_THAT(error_of([&] {
                sgd.build({parameter({3}), shared, shared});
              }).what(),
              HasSubstr("parameter 2 (shape [2], Double) is the same tensor as parameter 1"));
}

TEST(FunctionalOptimizer, RefusesAWrongNumberOfGradients) {
  const auto optimizer = SGD{.lr = 0.1}.build({parameter({2}), parameter({3})});
  const std::vector<at::Tensor> one = {torch::ones({2}, torch::kFloat64)};
  const Error error = error_of([&] { optimizer->step(one); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.what(), HasSubstr("2 parameters and got 1 gradients"));
}

TEST(FunctionalOptimizer, ChangesNothingWhenOneGradientIsWrong) {
  const at::Tensor first = parameter({2}), second = parameter({3});
  const auto optimizer = SGD{.lr = 0.1}.build({first, second});
  const at::Tensor good = torch::ones({2}, torch::kFloat64);
  for (const at::Tensor& wrong : {torch::ones({4}, torch::kFloat64), torch::ones({3}, torch::kFloat32)}) {
    const Error error = error_of([&] { optimizer->step(std::vector<at::Tensor>{good, wrong}); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), HasSubstr("parameter 1 (shape [3], Double) got a gradient of shape"));
    EXPECT_TRUE(first.equal(torch::ones({2}, torch::kFloat64)));
  }
}

TEST(FunctionalOptimizer, UpdatesInPlaceWithoutRecordingAndAdvancesTheVersion) {
  const at::Tensor leaf = parameter({2});
  const auto optimizer = Adagrad{}.build({leaf});
  const auto version = leaf._version();
  const void* data = leaf.data_ptr();
  optimizer->step(std::vector<at::Tensor>{torch::ones({2}, torch::kFloat64)});
  EXPECT_GT(leaf._version(), version);
  EXPECT_EQ(leaf.data_ptr(), data);
  EXPECT_TRUE(leaf.is_leaf());
  EXPECT_FALSE(leaf.grad().defined());
  EXPECT_TRUE(at::GradMode::is_enabled());
}

TEST(FunctionalOptimizer, MakesARetainedGraphNoticeTheUpdate) {
  const at::Tensor leaf = parameter({2});
  const at::Tensor loss = (leaf * leaf).sum();
  SGD{.lr = 0.1}.build({leaf})->step(std::vector<at::Tensor>{torch::ones({2}, torch::kFloat64)});
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(OptimizerSpec, NamesTheWrongOptionAndItsValueWhereItIsWritten) {
  const auto text = [](auto options) {
    return std::string(error_of([&] { OptimizerSpec spec(options); }).what());
  };
  EXPECT_THAT(text(SGD{}), HasSubstr("SGD{.lr = 0.01}"));
  EXPECT_THAT(text(SGD{.lr = -0.5}), HasSubstr("lr = -0.5"));
  EXPECT_THAT(text(SGD{.lr = 1, .momentum = -1}), HasSubstr("momentum = -1"));
  EXPECT_THAT(text(SGD{.lr = 1, .weight_decay = -2}), HasSubstr("weight_decay = -2"));
  EXPECT_THAT(text(SGD{.lr = 1, .dampening = std::nan("")}), HasSubstr("dampening = nan"));
  EXPECT_THAT(text(SGD{.lr = 1, .nesterov = true}), HasSubstr("nesterov = true with momentum = 0"));
  EXPECT_THAT(text(SGD{.lr = 1, .momentum = 0.9, .dampening = 0.1, .nesterov = true}),
              HasSubstr("dampening = 0.1"));
  EXPECT_THAT(text(Adagrad{.lr = -1}), HasSubstr("lr = -1"));
  EXPECT_THAT(text(Adagrad{.lr_decay = -1}), HasSubstr("lr_decay = -1"));
  EXPECT_THAT(text(Adagrad{.weight_decay = -1}), HasSubstr("weight_decay = -1"));
  EXPECT_THAT(text(Adagrad{.initial_accumulator_value = -1}), HasSubstr("initial_accumulator_value = -1"));
  EXPECT_THAT(text(Adagrad{.eps = INFINITY}), HasSubstr("eps = inf"));
}

TEST(OptimizerSpec, BuildsTheSameOptimizerAfterATransfer) {
  wire::Payload payload = wire::to_payload(OptimizerSpec(SGD{.lr = 0.5, .maximize = true}));
  const OptimizerSpec arrived = wire::from_payload<OptimizerSpec>(payload);
  const at::Tensor leaf = parameter({2});
  const auto optimizer = OptimizerTable().build(arrived, {leaf});
  optimizer->step(std::vector<at::Tensor>{torch::ones({2}, torch::kFloat64)});
  EXPECT_EQ(optimizer->name(), "SGD");
  EXPECT_TRUE(leaf.equal(torch::full({2}, 1.5, torch::kFloat64)));
}

struct HalfStep {
  static constexpr std::string_view kName = "HalfStep";
  double lr = 1;
  void validate() const {}
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const {
    return SGD{.lr = lr / 2}.build(std::move(parameters));
  }
};

}  // namespace
}  // namespace torchspan::optim::functional_test

template <>
struct torchspan::Wire<torchspan::optim::functional_test::HalfStep>
    : torchspan::WireStruct<torchspan::optim::functional_test::HalfStep, "HalfStep",
                            &torchspan::optim::functional_test::HalfStep::lr> {};

namespace torchspan::optim::functional_test {
namespace {

TEST(OptimizerTable, BuildsAKindThatAProgramAdds) {
  const at::Tensor leaf = parameter({1});
  OptimizerTable table;
  table.add<HalfStep>();
  EXPECT_THAT(table.kinds(), ::testing::IsSupersetOf({"HalfStep", "SGD", "Adagrad"}));
  table.build(HalfStep{.lr = 0.5}, {leaf})->step(std::vector<at::Tensor>{torch::ones({1}, torch::kFloat64)});
  EXPECT_DOUBLE_EQ(leaf.item<double>(), 0.75);
  EXPECT_THAT(error_of([&] { table.add<HalfStep>(); }).what(), HasSubstr("'HalfStep' already"));
}

TEST(OptimizerTable, ListsItsKindsWhenAKindIsUnknownOrOfAnotherVersion) {
  const Error unknown = error_of([] { OptimizerTable().build(HalfStep{}, {parameter({1})}); });
  EXPECT_EQ(unknown.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(unknown.what(), HasSubstr("no optimizer 'HalfStep' here, only Adadelta, Adagrad, Adam"));
  OptimizerSpec other(Adagrad{});
  other.type += 1;
  EXPECT_THAT(error_of([&] { OptimizerTable().build(other, {parameter({1})}); }).what(),
              HasSubstr("another layout"));
}

TEST(OptimizerTable, RefusesOptionsThatTheSenderNeverChecked) {
  OptimizerSpec spec(Adagrad{});
  spec.options.resize(3);
  EXPECT_EQ(error_of([&] { OptimizerTable().build(spec, {parameter({1})}); }).kind(), ErrorKind::kInvalid);
  OptimizerSpec negative(SGD{.lr = 1});
  negative.options = wire::to_payload(SGD{.lr = -1}).value;
  EXPECT_THAT(error_of([&] { OptimizerTable().build(negative, {parameter({1})}); }).what(),
              HasSubstr("lr = -1"));
}

}  // namespace
}  // namespace torchspan::optim::functional_test
