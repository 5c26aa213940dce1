#include "fashion_mnist/model.h"

#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include "fashion_mnist/dataset.h"

namespace fashion_mnist::model_test {
namespace {

template <class Half>
bool equal_parameters(const Half& a, const Half& b) {
  const auto left = a->parameters(), right = b->parameters();
  return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                    [](const torch::Tensor& x, const torch::Tensor& y) { return x.equal(y); });
}

template <class Half>
void expect_parameters_of_the_seed() {
  torch::manual_seed(1);
  const Half first(7);
  torch::manual_seed(2);
  const torch::Tensor expected_draw = torch::rand({4});
  torch::manual_seed(2);
  const Half second(7), other(8);
  EXPECT_TRUE(equal_parameters(first, second));
  EXPECT_FALSE(equal_parameters(first, other));
  for (const auto& parameter : first->named_parameters()) {
    EXPECT_TRUE(parameter.value().requires_grad() && parameter.value().is_leaf()) << parameter.key();
    EXPECT_TRUE(parameter.value().isfinite().all().template item<bool>()) << parameter.key();
  }
}

TEST(Model, HasTheSameParametersForTheSameSeedWhateverElseDraws) {
  expect_parameters_of_the_seed<Features>();
  expect_parameters_of_the_seed<Classifier>();
  expect_parameters_of_the_seed<ConvNet>();
}

TEST(Model, StartsWithParametersSpreadAsLibTorchSpreadsThem) {
  const Classifier classifier(3);
  const torch::Tensor weight = classifier->named_parameters()["hidden.weight"];
  const double bound = 1 / std::sqrt(weight.size(1));
  EXPECT_LE(weight.abs().max().item<double>(), bound);
  EXPECT_NEAR(weight.std().item<double>(), bound / std::sqrt(3), 0.02 * bound);
}

TEST(Model, TurnsImagesIntoLogarithmsOfProbabilities) {
  Features features(1);
  Classifier classifier(2);
  const torch::Tensor scores = classifier->forward(features->forward(torch::randn({3, 1, kSide, kSide})));
  EXPECT_EQ(scores.sizes(), (std::vector<std::int64_t>{3, kClasses}));
  EXPECT_TRUE(torch::allclose(scores.exp().sum(1), torch::ones(3)));
  EXPECT_TRUE(scores.requires_grad());
}

TEST(Model, InOnePieceTreatsEachImageByItself) {
  ConvNet network(1);
  const torch::Tensor images = torch::randn({5, 1, kSide, kSide});
  const torch::Tensor scores = network->forward(images);
  EXPECT_TRUE(torch::allclose(scores.exp().sum(1), torch::ones(5)));
  const torch::Tensor parts =
      torch::cat({network->forward(images.narrow(0, 0, 2)), network->forward(images.narrow(0, 2, 3))});
  EXPECT_TRUE(torch::allclose(scores, parts, 1e-5, 1e-6));
}

TEST(Model, RecordsNoGradientsInEvaluationAndReportsItsWork) {
  Classifier classifier(2);
  classifier->train(false);
  EXPECT_FALSE(classifier->forward(torch::randn({3, 1568})).requires_grad());
  classifier->train(true);
  EXPECT_TRUE(classifier->forward(torch::randn({3, 1568})).requires_grad());
  const WorkReport report = classifier->report();
  EXPECT_EQ(report.forward_calls, 2);
  EXPECT_EQ(report.parameters, 1568 * 128 + 128 + 128 * 10 + 10);
  EXPECT_GT(report.cpu_seconds, 0);
}

}  // namespace
}  // namespace fashion_mnist::model_test
