#include <functional>
#include <tuple>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::loss_test {
namespace {

at::Tensor of_batches(const Batch& output, const Batch& target) {
  return mean_square(output.members.at(0).toTensor(), target.members.at(0).toTensor()) +
         mean_square(output.members.at(1).toTensor(), target.members.at(1).toTensor());
}

TEST(PipelineLoss, TakesAllMembersIfItsParametersAreBatches) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("two", [](const at::Tensor& x) { return std::make_tuple(x, x * 2); });
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    const at::Tensor x = seeded({6, kWidth}, 3), y = seeded({6, kWidth}, 4);
    const Batch target = make_batch(y, y * 3);
    Dense dense(1u);
    const at::Tensor plain = dense->forward(x);
    const at::Tensor expected = mean_square(plain, y) + mean_square(plain * 2, y * 3);
    expected.backward();
    EXPECT_NEAR(pipe.train_step(x, target, of_batches), expected.item<double>(), 1e-12);
    expect_gradients(pipe, {dense.ptr()});
    const auto lambda = [](Batch output, const Batch& wanted) { return of_batches(output, wanted); };
    EXPECT_NEAR(pipe.train_step(x, target, lambda), expected.item<double>(), 1e-12);
    EXPECT_NEAR(pipe.train_step(x, target, loss_of(lambda)), expected.item<double>(), 1e-12);
  });
}

TEST(PipelineLoss, TakesATensorAndABatch) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add<Dense>(2u);
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    const at::Tensor x = seeded({6, kWidth}, 3), y = seeded({6, kWidth}, 4);
    const double loss =
        pipe.train_step(x, make_batch(y, 0.5), [](const at::Tensor& output, const Batch& target) {
          return mean_square(output, target.members.at(0).toTensor()) * target.members.at(1).toDouble();
        });
    Dense a(1u), b(2u);
    const at::Tensor expected = mean_square(b->forward(a->forward(x)), y) * 0.5;
    expected.backward();
    EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
    expect_gradients(pipe, {a.ptr(), b.ptr()});
  });
}

TEST(PipelineLoss, TakesTensorsIfItIsGeneric) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add<Dense>(2u);
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    const at::Tensor x = seeded({6, kWidth}, 3), y = seeded({6, kWidth}, 4);
    const auto generic = [](const auto& output, const auto& target) -> at::Tensor {
      return (output - target).square().mean();
    };
    const std::function<at::Tensor(at::Tensor, at::Tensor)> stored = mean_square;
    const double loss = pipe.train_step(x, y, mean_square);
    EXPECT_EQ(pipe.train_step(x, y, generic), loss);
    EXPECT_EQ(pipe.train_step(x, y, stored), loss);
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::loss_test
