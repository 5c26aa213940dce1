// forward() without the backward() that belongs to it, where the report of that overtakes the end of the forwards.
#include <gmock/gmock.h>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::abandoned_forward_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::pipeline_cluster;
using torchspan::testing::SimCluster;

constexpr Duration kLate = std::chrono::milliseconds(10);

at::Tensor input() { return seeded({4, kWidth}, 3); }
at::Tensor target() { return seeded({4, kWidth}, 4); }

Layers dense_layers(int stages) {
  Layers layers;
  for (int stage = 0; stage < stages; ++stage) layers.add<Dense>(static_cast<std::uint64_t>(stage) + 1);
  return layers;
}

/// Calls forward() before a step and at the end. `wait` delays this worker before each forward().
void abandon_forwards(Pipeline& pipe, const std::function<void()>& wait) {
  const double loss = pipe.train_step(input(), target(), mean_square);
  wait();
  pipe.forward(input());
  EXPECT_EQ(pipe.train_step(input(), target(), mean_square), loss);
  wait();
  pipe.forward(input());
}

/// Delays what the first worker sends to another one: what comes over a third worker arrives earlier.
void delay(SimCluster& world, const std::string& to) {
  world.network().delay_if(
      [to](const net::SimMessage& message) { return message.from == "sim:worker0" && message.to == to; },
      kLate);
}

TEST(AbandonedForward, DoesNotFailReplicasThatEndTheirForwardsLater) {
  for (const int late : {0, 1}) {
    on_workers(4, 1, [late](Worker& worker) {
      Pipeline pipe(worker, dense_layers(2), {.balance = {1, 1}, .replicas = 2, .micro_batches = 2});
      abandon_forwards(pipe, [&] {
        if (pipe.replica() == late) worker.runtime().executor.sleep(kLate);
      });
    });
  }
}

TEST(AbandonedForward, DoesNotFailStagesThatEndTheirForwardsLater) {
  for (const char* to : {"sim:worker1", "sim:worker2"}) {
    SimCluster world(pipeline_cluster(3));
    delay(world, to);
    world.run([](Worker& worker) {
      Pipeline pipe(worker, dense_layers(3), {.balance = {1, 1, 1}, .micro_batches = 2});
      abandon_forwards(pipe, [] {});
    });
  }
}

TEST(AbandonedForward, EndsTheBackwardOfAWorkerThatKnewOfItInItsForward) {
  std::string text;
  SimCluster world(pipeline_cluster(3));
  delay(world, "sim:worker1");
  world.run([&](Worker& worker) {
    Pipeline pipe(worker, dense_layers(3), {.balance = {1, 1, 1}, .micro_batches = 2});
    const double loss = pipe.train_step(input(), target(), mean_square);
    pipe.forward(input());
    if (worker.rank() == 1) text = error_text([&] { pipe.backward(); });
    EXPECT_EQ(pipe.train_step(input(), target(), mean_square), loss);
  });
  EXPECT_THAT(text, HasSubstr("step 1 of pipeline 'pipeline' was abandoned on worker 'worker2'"));
}

}  // namespace
}  // namespace torchspan::pipeline::testing::abandoned_forward_test
