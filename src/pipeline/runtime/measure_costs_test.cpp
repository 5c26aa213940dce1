#include <gmock/gmock.h>

#include <ATen/autocast_mode.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/torch.h>

#include <torchspan/pipeline.h>

#include "pipeline/pipeline_test_util.h"
#include "pipeline/plan/measuring.h"

namespace torchspan::pipeline::testing::measure_costs_test {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kRows = 100;
/// Bytes of a batch of doubles.
constexpr double kBatch = kRows * kWidth * 8;
/// Bytes of scalars (the loss and its gradient) and of vectors.
constexpr double kSmall = 128;

TEST(AllocationWatch, CountsWhatIsAliveByOwner) {
  const at::Tensor before = at::ones({1000}, at::kDouble);
  at::Tensor kept;
  {
    const AllocationWatch empty;
    EXPECT_EQ(empty.alive(0), 0);
  }
  AllocationWatch watch;
  watch.begin(3);
  kept = before * 2;
  { const at::Tensor dropped = before * 3; }
  const at::Tensor view = before.narrow(0, 0, 10);
  EXPECT_EQ(watch.alive(3), 8000);
  watch.begin(4);
  const at::Tensor other = at::ones({10}, at::kDouble);
  EXPECT_EQ(watch.alive(4), 80);
  kept = at::Tensor();
  EXPECT_EQ(watch.alive(3), 0);
  EXPECT_EQ(watch.alive(5), 0);
  EXPECT_EQ(error_text([] { const AllocationWatch second; }).find("while a profiler of LibTorch runs") ==
                std::string::npos,
            false);
}

CostSample sample_of(std::int64_t rows = kRows) {
  return {.input = BatchOf<at::Tensor>::from(seeded({rows, kWidth}, 3)),
          .target = BatchOf<at::Tensor>::from(seeded({rows, kWidth}, 4)),
          .loss = loss_of(mean_square),
          .repeats = 2};
}

std::vector<schedule::Costs> costs_of(const Layers& layers, const PipelineOptions& options, int workers) {
  std::vector<schedule::Costs> costs;
  on_workers(workers, 1, [&](Worker& worker) {
    if (worker.rank() == workers - 1) costs = measure_costs(worker, layers, options, sample_of());
  });
  return costs;
}

/// Dense keeps its input (for the weight) and its output (of tanh), not what is between.
Layers three_dense() {
  Layers layers;
  for (std::uint64_t layer = 0; layer < 3; ++layer) layers.add<Dense>(layer + 1);
  return layers;
}

TEST(PipelineCosts, AreTheBytesThatTheGraphOfEachRangeKeeps) {
  PipelineOptions options;
  options.checkpoint = ActivationCheckpoint::kNever;
  const auto costs = costs_of(three_dense(), options, 3);
  ASSERT_EQ(costs.size(), 3u);
  EXPECT_NEAR(costs[0].activation, kBatch, kSmall) << "the user has the input";
  EXPECT_NEAR(costs[1].activation, 2 * kBatch, kSmall) << "what it received, and its output";
  EXPECT_NEAR(costs[2].activation, 3 * kBatch, kSmall) << "besides, the difference that the loss squares";
  // The first range runs its whole backward as weight gradient, from the gradient that it received. The others keep
  // the product's saved input and incoming gradient.
  EXPECT_NEAR(*costs[0].weight_input, 2 * kBatch, kSmall);
  EXPECT_NEAR(*costs[1].weight_input, 2 * kBatch, kSmall);
  EXPECT_NEAR(*costs[2].weight_input, 2 * kBatch, kSmall);
  for (const schedule::Costs& each : costs) EXPECT_EQ(each.recomputation, 0);
}

TEST(PipelineCosts, OfACheckpointedRangeAreItsInputAndTheGraphOfItsRepetition) {
  PipelineOptions options;
  options.checkpoint = ActivationCheckpoint::kAlways;
  options.seed = 1;  // without it, each pass keeps the state of the generator
  const auto costs = costs_of(three_dense(), options, 3);
  ASSERT_EQ(costs.size(), 3u);
  EXPECT_NEAR(costs[0].activation, 0, kSmall);
  EXPECT_NEAR(costs[1].activation, kBatch, kSmall);
  EXPECT_NEAR(costs[2].activation, kBatch, kSmall);
  EXPECT_NEAR(costs[0].recomputation, kBatch, kSmall);
  EXPECT_NEAR(costs[1].recomputation, kBatch, kSmall);
  EXPECT_NEAR(costs[2].recomputation, 2 * kBatch, kSmall);
  EXPECT_NEAR(*costs[1].weight_input, 2 * kBatch, kSmall);
}

TEST(PipelineCosts, CountWhatIsHandedOnInsideAWorkerOnce) {
  PipelineOptions options;
  options.checkpoint = ActivationCheckpoint::kNever;
  options.workers = {"worker0", "worker0", "worker0"};
  const auto costs = costs_of(three_dense(), options, 1);
  ASSERT_EQ(costs.size(), 3u);
  EXPECT_NEAR(costs[0].activation + costs[1].activation + costs[2].activation, 4 * kBatch, kSmall);
  options.workers.clear();
  Layers skips;
  skips
      .add_function("stash",
                    [](const at::Tensor& x, Skips& all) {
                      const at::Tensor kept = x + 1;
                      all.stash("kept", kept);
                      return x * 1;
                    })
      .stashes("kept");
  skips.add<Dense>(1u);
  skips.add_function("pop", [](const at::Tensor& x, Skips& all) { return x * all.pop("kept"); }).pops("kept");
  const auto with_skip = costs_of(skips, options, 3);
  EXPECT_NEAR(with_skip[0].activation, 0, kSmall);
  EXPECT_NEAR(with_skip[1].activation, 2 * kBatch, kSmall);
  EXPECT_NEAR(with_skip[2].activation, 2 * kBatch, kSmall) << "the skip, and the loss; its other factor's "
                                                              "gradient needs no value";
}

TEST(PipelineCosts, LeaveExistingModulesAsTheyAre) {
  on_workers(1, 1, [](Worker& worker) {
    DeferredBatchNorm norm(kWidth);
    norm->to(at::kDouble);
    const Dense dense(1u);
    dense->weight.mutable_grad() = at::ones_like(dense->weight);
    Layers layers;
    layers.add_existing(norm);
    layers.add_function("drop", [](const at::Tensor& x) { return at::dropout(x, 0.5, true); });
    layers.add_existing(dense);
    torch::manual_seed(7);
    const double drawn = at::rand({1}, at::kDouble).item<double>();
    torch::manual_seed(7);
    for (const auto checkpoint : {ActivationCheckpoint::kNever, ActivationCheckpoint::kAlways}) {
      const auto costs = measure_costs(worker, layers, {.checkpoint = checkpoint}, sample_of());
      EXPECT_EQ(costs.size(), 1u);
    }
    EXPECT_EQ(at::rand({1}, at::kDouble).item<double>(), drawn);
    EXPECT_TRUE(dense->weight.grad().equal(at::ones_like(dense->weight)));
    EXPECT_FALSE(dense->bias.grad().defined());
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 0);
    norm->forward(sample_of().input.members[0].toTensor());
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 1) << "the next step begins anew";
  });
}

TEST(PipelineCosts, NameWhatIsWrong) {
  on_workers(1, 1, [](Worker& worker) {
    const Layers layers = three_dense();
    const auto refused = [&](const CostSample& sample) {
      return error_text([&] { measure_costs(worker, layers, {}, sample); });
    };
    CostSample sample = sample_of();
    sample.repeats = 0;
    EXPECT_THAT(refused(sample), HasSubstr("CostSample::repeats is 0"));
    sample = sample_of();
    sample.loss = nullptr;
    EXPECT_THAT(refused(sample), HasSubstr("CostSample::loss is empty"));
    sample = sample_of();
    sample.input = BatchOf<at::Tensor>::from(at::ones({2, kWidth + 1}, at::kDouble));
    EXPECT_THAT(refused(sample), HasSubstr("Dense' (order 0, stage 0"));
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::measure_costs_test
