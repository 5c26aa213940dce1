// The parts of the example, without other processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>

#include <torchspan/core/error.h>

#include "federated/options.h"
#include "federated/site.h"

namespace federated::federation_test {
namespace {

using Tensors = std::vector<at::Tensor>;

TEST(Partition, GivesEveryImageToOneClientAndFewClassesToEach) {
  const at::Tensor labels = at::arange(1000).remainder(10);
  const Tensors parts = partition(labels, 20, 2, 5);
  ASSERT_EQ(parts.size(), 20U);
  for (const at::Tensor& part : parts) {
    EXPECT_EQ(part.numel(), 50);
    // 40 pieces of 25 images: four of each class.
    EXPECT_LE(std::get<0>(at::_unique(labels.index_select(0, part))).numel(), 2);
  }
  EXPECT_TRUE(std::get<0>(at::cat(parts).sort()).equal(at::arange(1000)));
  EXPECT_FALSE(parts[0].equal(partition(labels, 20, 2, 6)[0])) << "drawn from the seed";
  EXPECT_THROW(partition(labels, 501, 2, 5), torchspan::Error);
}

TEST(Average, WeighsClientsByTheirImages) {
  const auto with = [](std::int64_t images, double value) {
    return Update{.images = images, .classes = {}, .parameters = {at::full({2}, value, at::kDouble)}};
  };
  const Tensors mean = average({with(1, 5), with(3, 1), with(4, 0)});
  ASSERT_EQ(mean.size(), 1U);
  EXPECT_TRUE(mean[0].allclose(at::full({2}, 1.0, at::kDouble), 1e-12, 1e-12));
}

Task task_of(std::int64_t epochs, std::int64_t batch) {
  Task task;
  task.epochs = epochs;
  task.batch = batch;
  task.lr = 0.1;
  return task;
}

TEST(Descend, StepsWithTheGradientOfAllImagesHoweverManyFitIntoMemory) {
  // 1025 images: two chunks of 512 and one image.
  const fashion_mnist::Dataset data{at::randint(0, 256, {1025, 28, 28}, at::kByte),
                                    at::arange(1025).remainder(10)};
  const Tensors first = [] {
    Tensors parameters;
    for (const at::Tensor& parameter : fashion_mnist::ConvNet(3)->parameters())
      parameters.push_back(parameter.detach().to(at::kDouble));
    return parameters;
  }();
  auto network = network_with(first), expected = network_with(first);
  descend(network, data, task_of(2, 0), [] { return true; });
  const auto all = data.batch(at::arange(1025));
  for (int step = 0; step < 2; ++step) {
    expected->zero_grad();
    torch::nll_loss(expected->forward(all.images.to(at::kDouble)), all.labels).backward();
    const torch::NoGradGuard off;
    for (at::Tensor parameter : expected->parameters()) parameter -= 0.1 * parameter.grad();
  }
  for (std::size_t i = 0; i < first.size(); ++i)
    EXPECT_TRUE(network->parameters()[i].allclose(expected->parameters()[i], 1e-10, 1e-12)) << i;
  EXPECT_FALSE(network->parameters()[0].allclose(first[0], 1e-10, 1e-12)) << "it must have moved";
}

TEST(Descend, EndsWhenItsCallerNoLongerWaits) {
  const fashion_mnist::Dataset data{at::zeros({40, 28, 28}, at::kByte), at::arange(40).remainder(10)};
  auto network = fashion_mnist::ConvNet(1);
  int steps = 0;
  descend(network, data, task_of(100, 4), [&] { return ++steps <= 3; });
  EXPECT_EQ(steps, 4);
}

}  // namespace
}  // namespace federated::federation_test
