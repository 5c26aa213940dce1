// Inference piece by piece, with state that stays at its layers.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"
#include "pipeline/runtime/cache_state.h"

namespace torchspan::pipeline::testing::cache_test {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using torchspan::testing::pipeline_cluster;
using torchspan::testing::SimCluster;

/// Returns the running sum over a row's columns, multiplied by a factor: the state is the sum so far.
struct RunningSumImpl : torch::nn::Module {
  explicit RunningSumImpl(double by, const bool* broken = nullptr) : factor(by), breaks(broken) {}
  at::Tensor forward(const at::Tensor& x, LayerCache& state) {
    at::Tensor sums = x.cumsum(1);
    if (state.active()) {
      if (!state.tensors().empty()) sums = sums + state.tensors()[0];
      state.tensors() = {sums.narrow(1, sums.size(1) - 1, 1)};
    }
    if (breaks != nullptr && *breaks) throw std::runtime_error("the layer broke");
    return sums * factor;
  }
  double factor;
  const bool* breaks;
};
TORCH_MODULE(RunningSum);

Layers sums(int stages, const bool* broken = nullptr) {
  Layers layers;
  for (int stage = 0; stage < stages; ++stage)
    layers.add<RunningSum>(1.0 + stage, stage + 1 == stages ? broken : nullptr);
  return layers;
}

/// What `stages` of these layers return for a whole row.
at::Tensor whole(at::Tensor x, int stages) {
  for (int stage = 0; stage < stages; ++stage) x = x.cumsum(1) * (1.0 + stage);
  return x;
}

TEST(Cache, GivesTheResultOfTheWholeSequence) {
  for (const Schedule schedule : {Schedule::kArrival, Schedule::kGPipe, Schedule::k1F1B}) {
    for (const int workers : {1, 2, 3}) {
      on_workers(workers, 1, [&](Worker& worker) {
        PipelineOptions options{.micro_batches = 3, .schedule = schedule};
        options.balance.assign(static_cast<std::size_t>(workers), 1);
        Pipeline pipe(worker, sums(workers), options);
        const at::Tensor x = seeded({7, 9}, 3);  // micro-batches of 3, 2 and 2 rows
        Cache one, other;                        // at the same time
        std::vector<at::Tensor> pieces;
        std::int64_t at = 0;
        for (const std::int64_t length : {4, 1, 3, 1}) {
          const Batch output = pipe.infer(x.narrow(1, at, length), one);
          pipe.infer(x.narrow(1, 0, 2) * 5, other);
          if (output.size() > 0) pieces.push_back(output.tensor());
          at += length;
        }
        if (!pieces.empty()) expect_close(at::cat(pieces, 1), whole(x, workers));
        const Batch alone = pipe.infer(x);
        if (alone.size() > 0) expect_close(alone.tensor(), whole(x, workers));
      });
    }
  }
}

TEST(Cache, KeepsOneStatePerUseOfALayer) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    const auto first = layers.add<RunningSum>(1.0, nullptr);
    const auto kept = first;
    layers.add<RunningSum>(2.0, nullptr);
    layers.reuse(kept);
    Pipeline pipe(worker, layers, {.balance = {1, 1}, .micro_batches = 2});
    const at::Tensor x = seeded({4, 6}, 3);
    Cache cache;
    std::vector<at::Tensor> pieces;
    for (std::int64_t at = 0; at < 6; at += 2) {
      const Batch output = pipe.infer(x.narrow(1, at, 2), cache);
      if (output.size() > 0) pieces.push_back(output.tensor());
    }
    if (!pieces.empty()) expect_close(at::cat(pieces, 1), (x.cumsum(1).cumsum(1) * 2).cumsum(1));
  });
}

TEST(Cache, GoesOnFromTheLastCallThatSucceeded) {
  on_workers(2, 1, [](Worker& worker) {
    bool broken = false;
    Pipeline pipe(worker, sums(2, &broken), {.balance = {1, 1}, .micro_batches = 2});
    const at::Tensor x = seeded({4, 6}, 3);
    Cache cache;
    pipe.infer(x.narrow(1, 0, 3), cache);
    broken = true;
    EXPECT_THAT(error_text([&] { pipe.infer(x.narrow(1, 3, 3), cache); }), HasSubstr("the layer broke"));
    broken = false;
    const Batch output = pipe.infer(x.narrow(1, 3, 3), cache);
    if (output.size() > 0) expect_close(output.tensor(), whole(x, 2).narrow(1, 3, 3));
  });
}

TEST(Cache, HoldsThisWorkersStateUntilItIsDestroyed) {
  on_workers(2, 1, [](Worker& worker) {
    std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> held;
    {
      Cache cache;
      {
        Pipeline pipe(worker, sums(2), {.balance = {1, 1}, .micro_batches = 2});
        for (int piece = 0; piece < 3; ++piece) pipe.infer(seeded({4, 2}, 3), cache);
        for (const auto& [use, tensors] : cache.state().tensors()) {
          EXPECT_EQ(use.first, worker.rank()) << "a state of another worker's layer";
          for (const at::Tensor& tensor : tensors) held.emplace_back(tensor.getIntrusivePtr());
        }
        EXPECT_EQ(held.size(), 2u) << "one for each micro-batch";
      }
      for (const auto& tensor : held) EXPECT_FALSE(tensor.expired());  // the cache outlives the pipeline
    }
    for (const auto& tensor : held) EXPECT_TRUE(tensor.expired());
  });
}

TEST(Cache, IsNotSeenInTraining) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers = sums(1);
    layers.add<Dense>(1u);
    Pipeline pipe(worker, layers, {.balance = {1, 1}, .micro_batches = 2});
    Dense dense(1u);
    const at::Tensor x = seeded({4, kWidth}, 3), y = seeded({4, kWidth}, 4);
    Cache cache;
    pipe.infer(x, cache);
    EXPECT_NEAR(pipe.train_step(x, y, mean_square),
                mean_square(dense->forward(whole(x, 1)), y).item<double>(), 1e-12);
  });
}

TEST(Cache, ReportsCallsThatDoNotFit) {
  std::vector<std::string> rows(2), caches(2), pipelines(2);
  on_workers(2, 1, [&](Worker& worker) {
    const PipelineOptions options{.balance = {1, 1}, .micro_batches = 2};
    Pipeline pipe(worker, sums(2), options), second(worker, sums(2), options);
    const at::Tensor x = seeded({4, 6}, 3);
    Cache cache, another;
    pipe.infer(x, cache);
    pipe.infer(x, another);
    rows[worker.rank()] = error_text([&] { pipe.infer(seeded({6, 6}, 3), cache); });
    caches[worker.rank()] = error_text([&] { pipe.infer(x, worker.rank() == 0 ? cache : another); });
    pipelines[worker.rank()] = error_text([&] { second.infer(x, cache); });
    const Batch output = pipe.infer(x, cache);
    if (output.size() > 0) expect_close(output.tensor(), whole(at::cat({x, x}, 1), 2).narrow(1, 6, 6));
  });
  EXPECT_THAT(rows, Each(HasSubstr("micro-batches of [2, 2] rows before, of [3, 3] now")));
  EXPECT_THAT(caches, Each(HasSubstr("pass different caches to infer() of pipeline 'pipeline' in step 3")));
  EXPECT_THAT(pipelines, Each(HasSubstr("this Cache belongs to another pipeline")));
}

TEST(Cache, EndsWithAnErrorThatNamesADeadWorker) {
  auto options = pipeline_cluster(3);
  options.graceful = false;
  SimCluster world(options);
  std::vector<std::string> texts(3);
  world.try_services([&](rpc::WorkerService& service) {
    Worker& worker = service.worker();
    worker.runtime().log.set_level(LogLevel::kOff);
    Pipeline pipe(worker, sums(3), {.balance = {1, 1, 1}, .micro_batches = 2});
    Cache cache;
    pipe.infer(seeded({4, 6}, 3), cache);
    if (worker.rank() == 1) {
      world.kill(1);
      return;
    }
    texts[worker.rank()] = error_text([&] { pipe.infer(seeded({4, 6}, 3), cache); });
  });
  for (const int rank : {0, 2}) {
    EXPECT_THAT(texts[static_cast<std::size_t>(rank)],
                HasSubstr("worker 'worker1' (rank 1), which owns stage 1, is unreachable"));
  }
}

TEST(Cache, StaysWithItsReplica) {
  on_workers(4, 1, [](Worker& worker) {
    Pipeline pipe(worker, sums(2), {.balance = {1, 1}, .replicas = 2, .micro_batches = 2});
    const at::Tensor x = seeded({4, 6}, 3 + static_cast<std::uint64_t>(pipe.replica()));
    Cache cache;
    pipe.infer(x.narrow(1, 0, 3), cache);
    const Batch output = pipe.infer(x.narrow(1, 3, 3), cache);
    if (output.size() > 0) expect_close(output.tensor(), whole(x, 2).narrow(1, 3, 3));
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::cache_test
