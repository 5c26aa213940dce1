// peer: pipe simple_linears
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <torchspan/pipeline.h>

#include "tests/support/pipeline_world.h"

namespace torchspan::pipeline_test {
namespace {

using pipeline::ActivationCheckpoint;
using pipeline::Batch;
using pipeline::Layers;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Schedule;
using testing::on_workers;

/// A layer whose weights follow from its seed alone.
struct DenseImpl : torch::nn::Module {
  DenseImpl(std::int64_t in, std::int64_t out, std::int64_t seed) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
    weight =
        register_parameter("weight", at::randn({in, out}, generator, at::kDouble) / std::sqrt(double(in)));
    bias = register_parameter("bias", at::randn({out}, generator, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::matmul(x, weight) + bias); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Dense);

at::Tensor numbers(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble);
}

at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

// peer: pipelining forward_only
TEST(Pipeline, OneWorkerTrainsLikeThePlainModel) {
  on_workers(1, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Dense>(4, 5, 1);
    layers.add<Dense>(5, 3, 2);
    Pipeline pipe(worker, layers, {.micro_batches = 3});
    const at::Tensor x = numbers({7, 4}, 3), y = numbers({7, 3}, 4);
    const double loss = pipe.train_step(x, y, mean_square);

    Dense a(4, 5, 1), b(5, 3, 2);
    const at::Tensor expected = mean_square(b->forward(a->forward(x)), y);
    expected.backward();
    EXPECT_NEAR(loss, expected.item<double>(), 1e-14);
    const auto parameters = pipe.parameters();
    ASSERT_EQ(parameters.size(), 4u);
    EXPECT_TRUE(at::allclose(parameters[0].grad(), a->weight.grad(), 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(parameters[3].grad(), b->bias.grad(), 1e-12, 1e-12));
  });
}

TEST(Pipeline, TwoWorkersTrainLikeThePlainModel) {
  for (const Schedule schedule : {Schedule::kArrival, Schedule::kGPipe, Schedule::k1F1B}) {
    for (const ActivationCheckpoint checkpoint :
         {ActivationCheckpoint::kNever, ActivationCheckpoint::kExceptLast, ActivationCheckpoint::kAlways}) {
      on_workers(2, 1, [&](Worker& worker) {
        Layers layers;
        layers.add<Dense>(4, 5, 1);
        layers.add<Dense>(5, 3, 2);
        Pipeline pipe(worker, layers, {.micro_batches = 3, .schedule = schedule, .checkpoint = checkpoint});
        const at::Tensor x = numbers({7, 4}, 3), y = numbers({7, 3}, 4);
        const double loss = pipe.train_step(x, y, mean_square);

        Dense a(4, 5, 1), b(5, 3, 2);
        const at::Tensor expected = mean_square(b->forward(a->forward(x)), y);
        expected.backward();
        EXPECT_NEAR(loss, expected.item<double>(), 1e-14);
        const auto parameters = pipe.parameters();
        ASSERT_EQ(parameters.size(), 2u);
        const Dense& mine = worker.rank() == 0 ? a : b;
        EXPECT_TRUE(at::allclose(parameters[0].grad(), mine->weight.grad(), 1e-12, 1e-12));
        EXPECT_TRUE(at::allclose(parameters[1].grad(), mine->bias.grad(), 1e-12, 1e-12));
      });
    }
  }
}

}  // namespace
}  // namespace torchspan::pipeline_test
