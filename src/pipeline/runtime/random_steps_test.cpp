// Which random numbers a step draws with PipelineOptions::seed: those of its number among the training steps, so that
// evaluations, failures and a new pipeline with the same count do not change them.
#include <algorithm>
#include <cmath>
#include <gmock/gmock.h>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::random_steps_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Without updates, the losses of two steps differ only by what the dropout draws.
Layers layers_with_dropout() {
  Layers layers;
  layers.add<Dense>(1u);
  layers.add_function("drop", [](const at::Tensor& x) { return drop(x); });
  layers.add<Dense>(2u);
  layers.add_function("drop again", [](const at::Tensor& x) {
    if (x.size(0) == 1) throw std::runtime_error("one row");
    return drop(x);
  });
  return layers;
}

class Trained {
 public:
  explicit Trained(Worker& worker, PipelineOptions options = {})
      : pipe(worker, layers_with_dropout(), complete(std::move(options))) {}
  double step() { return pipe.train_step(rows, target, mean_square); }

  const at::Tensor rows = seeded({6, kWidth}, 3), target = seeded({6, kWidth}, 4);
  Pipeline pipe;

 private:
  static PipelineOptions complete(PipelineOptions options) {
    options.balance = {2, 2};
    options.micro_batches = 2;
    options.seed = 5;
    return options;
  }
};

/// The losses of the first steps of a training.
std::vector<double> first_losses(Worker& worker) {
  Trained trained(worker);
  std::vector<double> losses;
  for (int step = 0; step < 4; ++step) losses.push_back(trained.step());
  EXPECT_EQ(trained.pipe.training_steps(), 4u);
  std::vector<double> distinct = losses;
  std::sort(distinct.begin(), distinct.end());
  EXPECT_EQ(std::unique(distinct.begin(), distinct.end()), distinct.end());
  return losses;
}

TEST(RandomSteps, EvaluationsAndFailuresDoNotChangeThoseOfTheTraining) {
  on_workers(2, 1, [](Worker& worker) {
    const std::vector<double> losses = first_losses(worker);
    Trained trained(worker);
    std::vector<double> got{trained.step()};
    std::vector<at::Tensor> outputs;
    for (int call = 0; call < 2; ++call) {
      const Batch output = trained.pipe.infer(trained.rows);
      if (output.size() > 0) outputs.push_back(output.tensor());
    }
    if (!outputs.empty()) {
      EXPECT_FALSE(at::equal(outputs[0], outputs[1])) << "each call draws other numbers";
    }
    {
      const torch::NoGradGuard no_grad;
      trained.step();
    }
    got.push_back(trained.step());
    EXPECT_THAT(error_text([&] {
                  trained.pipe.train_step(trained.rows.narrow(0, 0, 1), trained.target.narrow(0, 0, 1),
                                          mean_square);
                }),
                HasSubstr("one row"));
    EXPECT_EQ(trained.pipe.training_steps(), 2u);
    got.push_back(trained.step());
    trained.pipe.forward(trained.rows);  // abandoned
    got.push_back(trained.step());
    EXPECT_EQ(got, losses);
  });
}

TEST(RandomSteps, ContinueTheCountOfAnotherPipeline) {
  on_workers(2, 1, [](Worker& worker) {
    const std::vector<double> losses = first_losses(worker);
    Trained trained(worker);
    trained.pipe.set_training_steps(2);
    EXPECT_EQ(trained.step(), losses[2]);
    EXPECT_EQ(trained.pipe.training_steps(), 3u);
    trained.pipe.set_training_steps(0);
    EXPECT_EQ(trained.step(), losses[0]);
  });
}

TEST(RandomSteps, OfWorkersWhoseGradientsAreDisabledElsewhereCountAlike) {
  std::vector<std::uint64_t> steps(2);
  on_workers(2, 1, [&](Worker& worker) {
    Trained trained(worker);
    {
      const torch::AutoGradMode mode(worker.rank() != 0);  // the first worker decides
      trained.step();
    }
    trained.step();
    steps[worker.rank()] = trained.pipe.training_steps();
  });
  EXPECT_THAT(steps, ElementsAre(1u, 1u));
}

TEST(RandomSteps, AreThoseOfTheirBatchIfStepsOverlap) {
  on_workers(2, 1, [](Worker& worker) {
    const std::vector<double> losses = first_losses(worker);
    Trained trained(worker, {.staleness = 1});
    EXPECT_FALSE(trained.pipe.in_flight());
    EXPECT_TRUE(std::isnan(trained.step()));
    EXPECT_TRUE(trained.pipe.in_flight());
    EXPECT_EQ(trained.step(), losses[0]);
    EXPECT_EQ(trained.step(), losses[1]);
    EXPECT_EQ(trained.pipe.training_steps(), 2u);
    EXPECT_EQ(trained.pipe.finish(), losses[2]);
    EXPECT_FALSE(trained.pipe.in_flight());
    EXPECT_EQ(trained.pipe.training_steps(), 3u);
    trained.step();
    EXPECT_EQ(trained.pipe.finish(), losses[3]);
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::random_steps_test
