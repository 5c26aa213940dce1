// Options of one step that the replicas of a pipeline must agree on.
#include <gmock/gmock.h>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::replica_options_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ReplicaOptions, GradientScalesThatDifferFailOnAllWorkersAndLeaveGradients) {
  std::vector<std::string> texts(6);
  on_workers(6, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add<Dense>(2u);
    Pipeline pipe(worker, layers, {.balance = {1, 1}, .replicas = 3, .micro_batches = 2});
    const at::Tensor rows = seeded({4, kWidth}, 3);
    const auto step = [&](double scale) {
      return pipe.train_step(rows, rows, mean_square, {.gradient_scale = scale});
    };
    step(0.5);
    const at::Tensor before = pipe.parameters()[0].grad().clone();
    texts[worker.rank()] = error_text([&] { step(pipe.replica() == 2 ? 0.25 : 0.5); });
    EXPECT_TRUE(at::equal(pipe.parameters()[0].grad(), before));
    step(0.5);
    expect_close(pipe.parameters()[0].grad(), 2 * before);
  });
  for (const std::string& text : texts)
    EXPECT_THAT(text, AllOf(HasSubstr("gradient_scale"), HasSubstr("0.25"), HasSubstr("replica 2")));
}

TEST(ReplicaOptions, DifferentFunctionsEndTheStepBeforeItIsComputed) {
  constexpr int kMicroBatches = 40;
  std::vector<int> forwards(4);
  on_workers(4, 1, [&](Worker& worker) {
    Layers layers;
    for (int stage = 0; stage < 2; ++stage) {
      layers.add_function("slow", [&forwards, &worker](const at::Tensor& x) {
        ++forwards[worker.rank()];
        worker.runtime().executor.sleep(std::chrono::milliseconds(100));
        return x * 2;
      });
    }
    Pipeline pipe(worker, layers, {.balance = {1, 1}, .replicas = 2, .micro_batches = kMicroBatches});
    const at::Tensor rows = seeded({kMicroBatches, kWidth}, 3);
    const auto call = [&](bool trains) {
      const torch::AutoGradMode mode(trains);
      pipe.train_step(rows, rows, mean_square);
    };
    for (const auto& different : std::vector<std::function<void()>>{
             [&] { pipe.replica() == 0 ? void(pipe.infer(rows)) : call(true); },
             [&] { call(pipe.replica() == 0); },
             [&] { pipe.replica() == 0 ? call(true) : void(pipe.forward(rows)); }}) {
      EXPECT_THAT(error_text(different), AllOf(HasSubstr("call different functions in step"),
                                               HasSubstr("train_step()"), HasSubstr(" and ")));
    }
  });
  for (const int count : forwards) EXPECT_LT(count, kMicroBatches) << "in three steps";
}

}  // namespace
}  // namespace torchspan::pipeline::testing::replica_options_test
