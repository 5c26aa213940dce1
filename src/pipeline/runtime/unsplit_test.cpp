#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::unsplit_test {
namespace {

// Tensors that are not split, whatever their first dimension.

/// x, and a matrix over the columns whose first dimension happens to equal the number of rows.
at::Tensor mix_columns(const at::Tensor& x, const at::Tensor& matrix) { return at::matmul(x, matrix); }

TEST(PipelineUnsplit, AnInputGoesWholeToAllMicroBatchesAndGetsTheSumOfTheirGradients) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Layers layers;
      layers.add_function("keep", [](const at::Tensor& x, Unsplit matrix) {
        EXPECT_EQ(matrix.tensor.size(0), kWidth);
        return std::make_tuple(x * 2, matrix);
      });
      layers.add_function("mix", [](const at::Tensor& x, const Unsplit& matrix) {
        EXPECT_EQ(matrix.tensor.size(0), kWidth);
        return mix_columns(x, matrix.tensor);
      });
      layers.add<Dense>(1u);
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({kWidth, kWidth}, 3), y = seeded({kWidth, kWidth}, 4);
      const at::Tensor matrix = seeded({kWidth, kWidth}, 5).set_requires_grad(true);
      const double loss = pipe.train_step(make_batch(x, Unsplit{matrix}), y, mean_square);

      const at::Tensor plain = seeded({kWidth, kWidth}, 5).set_requires_grad(true);
      Dense dense(1u);
      const at::Tensor expected = mean_square(dense->forward(mix_columns(x * 2, plain)), y);
      expected.backward();
      EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
      expect_gradients(pipe, {nullptr, nullptr, dense.ptr()});
      if (worker.rank() == 0) expect_close(matrix.grad(), plain.grad());
    });
  });
}

TEST(PipelineUnsplit, ATargetGoesWholeToEveryLoss) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add<Dense>(2u);
    Pipeline pipe(worker, layers, {.micro_batches = 3});
    const at::Tensor x = seeded({kWidth, kWidth}, 3), y = seeded({kWidth, kWidth}, 4);
    const at::Tensor weights = seeded({kWidth}, 5);
    const auto weighted = [](const at::Tensor& output, const std::pair<at::Tensor, at::Tensor>& target) {
      return ((output - target.first).square() * target.second).mean();
    };
    const double loss = pipe.train_step(x, Batch({y, weights}).mark_unsplit(1),
                                        loss_of<at::Tensor, std::pair<at::Tensor, at::Tensor>>(weighted));
    Dense a(1u), b(2u);
    EXPECT_NEAR(loss, weighted(b->forward(a->forward(x)), {y, weights}).item<double>(), 1e-12);
  });
}

TEST(PipelineUnsplit, OutputsOfMicroBatchesAreStackedAndTakeTheirGradientsApart) {
  for (const int micro_batches : {1, 2}) {
    on_workers(2, 1, [&](Worker& worker) {
      Layers layers;
      layers.add<Dense>(1u);
      // The mark is sent with the batch.
      layers.add_function(
          "gram", [](const at::Tensor& x) { return std::make_tuple(x, Unsplit{at::matmul(x.t(), x)}); });
      layers.add_function("pass", [](const Batch& all) { return all; });
      Pipeline pipe(worker, layers, {.balance = {2, 1}, .micro_batches = micro_batches});
      const at::Tensor x = seeded({4, kWidth}, 3);
      const Batch output = pipe.forward(x);
      Dense dense(1u);
      at::Tensor plain = at::zeros({}, at::kDouble);
      for (const at::Tensor& piece : x.tensor_split(micro_batches)) {
        const at::Tensor y = dense->forward(piece);
        plain = plain + at::matmul(y.t(), y).exp().sum();
      }
      plain.backward();
      if (worker.rank() == 1) {
        const at::Tensor grams = output.members[1].toTensor();
        EXPECT_EQ(grams.dim(), micro_batches == 1 ? 2 : 3);
        EXPECT_EQ(grams.size(0), micro_batches == 1 ? kWidth : 2);
        grams.exp().sum().backward();
      }
      pipe.backward();
      expect_gradients(pipe, {dense.ptr()});
    });
  }
}

}  // namespace
}  // namespace torchspan::pipeline::testing::unsplit_test
