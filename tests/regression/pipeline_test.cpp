// Defects in the event loop of an earlier multi-process pipeline ("the old loop"), found by running it in
// threads or by reading it, and what TorchSpan does instead. Each test covers one defect.
#include <algorithm>
#include <atomic>
#include <gtest/gtest.h>
#include <map>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/pipeline.h>
#include <torchspan/pipeline/deferred_batch_norm.h>

#include "tests/support/pipeline_world.h"

namespace torchspan::pipeline_defects_test {
namespace {

using pipeline::ActivationCheckpoint;
using pipeline::Batch;
using pipeline::DeferredBatchNorm;
using pipeline::Layers;
using pipeline::loss_of;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Schedule;
using pipeline::Skips;
using pipeline::Use;
using testing::on_workers;
namespace nn = torch::nn;

constexpr std::int64_t kWidth = 3;

at::Tensor seeded(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble);
}
at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

struct DenseImpl : nn::Module {
  explicit DenseImpl(std::uint64_t seed) {
    weight = register_parameter("weight", seeded({kWidth, kWidth}, seed));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::matmul(x, weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Dense);

/// A network on which messages of different workers overtake one another, in a different order under every
/// seed.
void on_unsteady_network(int workers, std::uint64_t seed, const std::function<void(Worker&)>& body) {
  auto options = testing::pipeline_cluster(workers, seed);
  options.network.jitter = std::chrono::milliseconds(2);
  testing::SimCluster world(options);
  world.run(body);
}

/// Trains a model of reused layers, with one event per use and one stage per number of `balance`, and
/// compares with one process.
void expect_like_one_process(const std::string& events, std::vector<int> balance,
                             PipelineOptions options = {}) {
  on_workers(static_cast<int>(balance.size()), 1, [&](Worker& worker) {
    Layers layers;
    std::map<char, Use<DenseImpl>> uses;
    std::map<char, Dense> twins;
    const at::Tensor x = seeded({7, kWidth}, 4), y = seeded({7, kWidth}, 5);
    for (const char event : events) {
      const auto seed = static_cast<std::uint64_t>(event - 'A');
      if (uses.contains(event)) {
        layers.reuse(uses.at(event));
      } else {
        uses.emplace(event, layers.add<Dense>(seed));
        twins.emplace(event, Dense(seed));
      }
    }
    PipelineOptions mine = options;
    mine.balance = balance;
    mine.micro_batches = 4;
    Pipeline pipe(worker, layers, mine);
    const double loss = pipe.train_step(x, y, mean_square);
    at::Tensor plain = x;
    for (const char event : events) plain = twins.at(event)->forward(plain);
    const at::Tensor expected = mean_square(plain, y);
    expected.backward();
    EXPECT_NEAR(loss, expected.item<double>(), 1e-12) << events;
    int layer = 0;
    for (auto& [event, twin] : twins) {
      const auto module = pipe.module(layer++);
      if (!module) continue;
      EXPECT_TRUE(at::allclose(module->parameters()[0].grad(), twin->weight.grad(), 1e-12, 1e-12)) << event;
    }
  });
}

// 1. The old loop merged B and C, the single-use layers of a stage, over the reuse between them: A(BC)A(BC).
// peer suite: async_pipe the eighteen defects of its loop: better
TEST(PipelineDefects, LayersOfAStageThatAReuseSeparatesRunOnceEach) {
  expect_like_one_process("ABAC", {1, 2});
}

// 2. The old loop ran A once.
TEST(PipelineDefects, ALayerTwiceInARowRunsTwice) { expect_like_one_process("AAB", {1, 1}); }

// 3. The old loop dropped all layers after the last new one: A B.
TEST(PipelineDefects, ARepeatAfterTheLastNewLayerIsRun) { expect_like_one_process("ABA", {1, 1}); }

/// Counts the live graphs: each keeps one tensor that is freed with it.
struct Graphs {
  int alive = 0;
  int most = 0;
  at::Tensor keep(const at::Tensor& x) {
    auto* memory = new double(1);
    most = std::max(most, ++alive);
    return x * at::from_blob(
                   memory, {1},
                   [this, memory](void*) {
                     --alive;
                     delete memory;
                   },
                   at::kDouble);
  }
};

// 4. The old loop retained every graph of a rank until it ended: it used as much memory as GPipe, although
// gradients arrived early.
TEST(PipelineDefects, GraphsAreFreedWithTheirMicroBatch) {
  std::vector<Graphs> graphs(2);
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    for (std::uint64_t stage = 0; stage < 2; ++stage) {
      layers.add<Dense>(stage);
      layers.add_function("keep", [&each = graphs[stage]](const at::Tensor& x) { return each.keep(x); });
    }
    Pipeline pipe(
        worker, layers,
        {.balance = {2, 2}, .workers = {}, .micro_batches = 8, .checkpoint = ActivationCheckpoint::kNever});
    pipe.train_step(seeded({8, kWidth}, 1), seeded({8, kWidth}, 2), mean_square);
  });
  EXPECT_EQ(graphs[0].most, 2);
  EXPECT_EQ(graphs[1].most, 1);
}

// 5. The old loop had a reference cycle on a tail with a reused layer: 4, 8, 12 graphs after steps 1, 2, 3.
TEST(PipelineDefects, ATailWithAReusedLayerLeaksNothing) {
  Graphs graphs;
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    const auto first = layers.add<Dense>(1u);
    const auto tail = layers.add_function("keep", [&](const at::Tensor& x) { return graphs.keep(x); });
    layers.reuse(first);
    layers.reuse(tail);
    Pipeline pipe(worker, layers, {.micro_batches = 4, .checkpoint = ActivationCheckpoint::kNever});
    for (int step = 0; step < 3; ++step) {
      pipe.train_step(seeded({8, kWidth}, 1), seeded({8, kWidth}, 2), mean_square);
      if (worker.rank() == 1) {
        EXPECT_EQ(graphs.alive, 0) << "after step " << step;
      }
    }
  });
}

// 6. The old loop crashed on the first gradient: the first stage has no parameters to train and no
// checkpoint.
TEST(PipelineDefects, AFirstStageWithoutParametersIsNoError) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add_function("double", [](const at::Tensor& x) { return x * 2; });
    layers.add<Dense>(1u);
    Pipeline pipe(worker, layers, {.micro_batches = 4, .checkpoint = ActivationCheckpoint::kNever});
    pipe.train_step(seeded({8, kWidth}, 1), seeded({8, kWidth}, 2), mean_square);
    if (worker.rank() == 1) {
      EXPECT_TRUE(pipe.parameters()[0].grad().defined());
    }
  });
}

// 7. In the old loop, after a training step under no_grad, or with a tail that never calls backward(), all
// other ranks waited forever.
TEST(PipelineDefects, ABackwardThatNeverComesEndsTheStepOfTheOthers) {
  on_workers(3, 1, [](Worker& worker) {
    Layers layers;
    for (std::uint64_t seed : {1u, 2u, 3u}) layers.add<Dense>(seed);
    const at::Tensor x = seeded({8, kWidth}, 1), y = seeded({8, kWidth}, 2);
    Pipeline pipe(worker, layers, {.micro_batches = 4});
    {
      const torch::NoGradGuard guard;
      pipe.train_step(x, y, mean_square);
    }
    pipe.forward(x);
    if (worker.rank() == 2) {
      pipe.train_step(x, y, mean_square);  // abandons the step and starts the next one
      return;
    }
    try {
      pipe.backward();
      ADD_FAILURE() << "there were no gradients";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("without calling backward()"), std::string::npos)
          << error.what();
    }
    pipe.train_step(x, y, mean_square);
  });
}

// 8. The old loop looked for the result in the last partition, wherever the model ended.
TEST(PipelineDefects, TheResultIsThatOfTheLastUse) {
  on_workers(3, 1, [](Worker& worker) {
    Layers layers;
    layers.add_function("plus", [](const at::Tensor& x) { return x + 1; });
    const auto middle = layers.add_function("times", [](const at::Tensor& x) { return x * 2; });
    layers.add_function("minus", [](const at::Tensor& x) { return x - 3; });
    layers.reuse(middle);
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    const Batch output = pipe.infer(at::ones({4, 1}));
    ASSERT_EQ(output.size(), worker.rank() == 1 ? 1u : 0u);
    if (worker.rank() == 1) {
      EXPECT_TRUE(output.tensor().equal(at::full({4, 1}, 2.0)));
    }
  });
}

// 9. The old loop deadlocked when two ranks sent to each other at once, and its header had room for 1024
// bytes.
TEST(PipelineDefects, WorkersThatSendToEachOtherAtOnceDoNotDeadlock) {
  for (const Schedule schedule : {Schedule::kArrival, Schedule::kGPipe, Schedule::k1F1B}) {
    on_workers(2, 1, [&](Worker& worker) {
      const auto more = [](std::vector<at::Tensor> all) {
        for (at::Tensor& each : all) each = each + 1;
        return all;
      };
      Layers layers;
      const auto a = layers.add_function("a", more), b = layers.add_function("b", more);
      for (int round = 0; round < 5; ++round) {
        layers.reuse(a);
        layers.reuse(b);
      }
      Pipeline pipe(worker, layers, {.micro_batches = 16, .schedule = schedule});
      std::vector<c10::IValue> many(200, at::zeros({16, 50}));
      const Batch output = pipe.infer(Batch(many));
      if (worker.rank() == 1) {
        EXPECT_TRUE(output.members.at(199).toTensor().equal(at::full({16, 50}, 12.0)));
      }
    });
  }
}

// 10. The old loop's messages had no step number: in evaluation the head ran ahead, and a stage with two
// sources mixed two steps.
TEST(PipelineDefects, StepsOfEvaluationAreNotMixed) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    on_unsteady_network(3, seed, [](Worker& worker) {
      Layers layers;
      const auto first = layers.add_function("first", [](const at::Tensor& x) { return x + 1; });
      layers.add_function("second", [](const at::Tensor& x) { return x * 10; });
      layers.reuse(first);
      layers.add_function("last", [](const at::Tensor& x) { return x * 1; });
      Pipeline pipe(worker, layers, {.micro_batches = 4, .schedule = Schedule::kArrival});
      for (int step = 0; step < 5; ++step) {
        const Batch output = pipe.infer(at::full({4, 1}, double(step)));
        if (worker.rank() != 2) continue;
        EXPECT_TRUE(output.tensor().equal(at::full({4, 1}, (step + 1) * 10.0 + 1)));
      }
    });
  }
}

// 11. The old loop summed gradients in the order of arrival. With a schedule table the network does not
// affect the result: every bit is equal.
TEST(PipelineDefects, GradientsDoNotDependOnTheOrderOfArrival) {
  std::vector<at::Tensor> gradients;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    on_unsteady_network(2, seed, [&](Worker& worker) {
      Layers layers;
      const auto first = layers.add<Dense>(1u);
      const auto second = layers.add<Dense>(2u);
      layers.reuse(first);
      layers.reuse(second);
      Pipeline pipe(worker, layers, {.micro_batches = 8, .schedule = Schedule::k1F1B});
      pipe.train_step(seeded({16, kWidth}, 1), seeded({16, kWidth}, 2), mean_square);
      if (worker.rank() == 0) gradients.push_back(pipe.parameters()[0].grad().clone());
    });
    EXPECT_TRUE(gradients.back().equal(gradients.front())) << "seed " << seed;
  }
}

// 12. The old loop nested the backwards of a tail with a reused layer: one round trip per micro-batch.
TEST(PipelineDefects, BackwardsOfATailWithAReusedLayerOverlap) {
  auto cluster = testing::pipeline_cluster(2);
  cluster.network.latency = std::chrono::milliseconds(10);
  Duration makespan{0};
  testing::SimCluster world(cluster);
  world.run([&](Worker& worker) {
    Layers layers;
    const auto first = layers.add<Dense>(1u), tail = layers.add<Dense>(2u);
    layers.reuse(first);
    layers.reuse(tail);
    PipelineOptions options;
    options.micro_batches = options.max_in_flight = 16;
    options.schedule = Schedule::kArrival;
    options.checkpoint = ActivationCheckpoint::kNever;
    Pipeline pipe(worker, layers, options);
    pipe.train_step(seeded({16, kWidth}, 1), seeded({16, kWidth}, 2), mean_square);
    if (worker.rank() == 0) makespan = pipe.last_step().measured.makespan;
  });
  EXPECT_GE(makespan, std::chrono::milliseconds(60)) << "three hops there and three back";
  EXPECT_LT(makespan, std::chrono::milliseconds(16 * 10)) << "and not as many as there are micro-batches";
}

// 13. The old loop gave skip trackers to the stages and sent nothing for them.
TEST(PipelineDefects, SkipConnectionsCrossStages) {
  on_workers(3, 1, [](Worker& worker) {
    Layers layers;
    layers
        .add_function("stash",
                      [](const at::Tensor& x, Skips& skips) {
                        skips.stash("s", x);
                        return x * 2;
                      })
        .stashes("s");
    layers.add_function("plus", [](const at::Tensor& x) { return x + 1; });
    layers.add_function("pop", [](const at::Tensor& x, Skips& skips) { return x - skips.pop("s"); })
        .pops("s");
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    const Batch output = pipe.infer(at::full({4, 1}, 5.0));
    if (worker.rank() == 2) {
      EXPECT_TRUE(output.tensor().equal(at::full({4, 1}, 6.0)));
    }
  });
}

// 14. The old loop began to recompute a forward only when its gradient had arrived.
TEST(PipelineDefects, ForwardsAreRepeatedWhileTheGradientIsAwaited) {
  std::vector<std::string> events;
  on_workers(2, 1, [&](Worker& worker) {
    Executor& executor = worker.runtime().executor;
    int forwards = 0;
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("note", [&](const at::Tensor& x) {
      if (++forwards == 2) events.push_back("repeated");
      return x * 1;
    });
    layers.add_function("slow", [&](const at::Tensor& x) {
      at::Tensor y = x * 1;
      if (y.requires_grad()) {
        y.register_hook([&](const at::Tensor&) {
          executor.sleep(std::chrono::seconds(1));
          events.push_back("the tail's backward");
        });
      }
      return y;
    });
    Pipeline pipe(
        worker, layers,
        {.balance = {2, 1}, .workers = {}, .micro_batches = 1, .checkpoint = ActivationCheckpoint::kAlways});
    pipe.train_step(seeded({4, kWidth}, 1), seeded({4, kWidth}, 2), mean_square);
  });
  EXPECT_EQ(events, (std::vector<std::string>{"repeated", "the tail's backward"}));
}

// 15. The old loop sent full-size zeros for integers and for unused outputs.
TEST(PipelineDefects, UnusedOutputsGetNoZeros) {
  std::map<std::string, int> gradients;
  on_workers(2, 1, [&](Worker& worker) {
    const auto note = [&gradients](at::Tensor x, const std::string& name) {
      if (x.requires_grad()) x.register_hook([&gradients, name](const at::Tensor&) { ++gradients[name]; });
      return x;
    };
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("three", [note](const at::Tensor& x) {
      return std::make_tuple(note(x * 2, "used"), note(x * 3, "unused"), (x > 0).to(at::kLong));
    });
    layers.add_function("choose",
                        [](const at::Tensor& a, const at::Tensor&, const at::Tensor& c) { return a * c; });
    Pipeline pipe(
        worker, layers,
        {.balance = {2, 1}, .workers = {}, .micro_batches = 4, .checkpoint = ActivationCheckpoint::kNever});
    pipe.train_step(seeded({8, kWidth}, 1), seeded({8, kWidth}, 2), mean_square);
  });
  EXPECT_EQ(gradients, (std::map<std::string, int>{{"used", 4}}));
}

// 16. The old loop needed an input of the right size on every rank to determine the number of micro-batches.
TEST(PipelineDefects, OnlyTheFirstAndLastWorkerNeedTheBatch) {
  on_workers(3, 1, [](Worker& worker) {
    Layers layers;
    for (std::uint64_t seed : {1u, 2u, 3u}) layers.add<Dense>(seed);
    Pipeline pipe(worker, layers, {.micro_batches = 4});
    for (const std::int64_t rows : {8, 3, 1}) {
      const Batch x = worker.rank() == 0 ? Batch(seeded({rows, kWidth}, 1)) : Batch();
      const Batch y = worker.rank() == 2 ? Batch(seeded({rows, kWidth}, 2)) : Batch();
      pipe.train_step(x, y, loss_of(mean_square));
      EXPECT_EQ(pipe.last_step().micro_batches, std::min<std::int64_t>(rows, 4));
    }
  });
}

/// Trains on the second of its two inputs.
struct MixedImpl : nn::Module {
  MixedImpl() { weight = register_parameter("weight", seeded({kWidth, kWidth}, 8)); }
  at::Tensor forward(const at::Tensor& words, const at::Tensor& x) { return at::matmul(x, weight) * words; }
  at::Tensor weight;
};
TORCH_MODULE(Mixed);

// 17. The old loop treated a tuple of one as a tensor, and failed if no tensor, or not the first one, takes a
// gradient.
TEST(PipelineDefects, NothingDependsOnTheFirstTensorOfABatch) {
  on_workers(3, 1, [](Worker& worker) {
    Layers layers;
    layers.add_function("words", [](const at::Tensor& x) { return std::make_tuple((x > 0).to(at::kLong)); });
    layers.add_function("two", [](const Batch& all) {
      EXPECT_TRUE(all.tuple);
      return std::make_tuple(all.tensor(), all.tensor().to(at::kDouble));
    });
    layers.add<Mixed>();
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    pipe.train_step(seeded({4, kWidth}, 1), seeded({4, kWidth}, 2), mean_square);
    if (worker.rank() == 2) {
      EXPECT_TRUE(pipe.parameters()[0].grad().defined());
    }
  });
}

// 18. The old loop split 6 rows in 4 into 3: except_last then checkpointed all, and deferred batch norm did
// not commit.
TEST(PipelineDefects, SixRowsInFourAreFourMicroBatches) {
  int forwards = 0;
  on_workers(1, 1, [&](Worker& worker) {
    DeferredBatchNorm norm(nn::BatchNormOptions{kWidth});
    norm->to(at::kDouble);
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("spread", [&forwards](const at::Tensor& x) {
      ++forwards;
      return at::cat({x, x * 2});  // one row has no variance
    });
    layers.add_existing(norm);
    Pipeline pipe(worker, layers, {.micro_batches = 4, .checkpoint = ActivationCheckpoint::kExceptLast});
    const auto loss = [](const at::Tensor& y, const at::Tensor&) { return y.sum(); };
    pipe.train_step(seeded({6, kWidth}, 1), seeded({6, kWidth}, 2), loss);
    EXPECT_EQ(pipe.last_step().micro_batches, 4);
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 1);
  });
  EXPECT_EQ(forwards, 4 + 3);
}

}  // namespace
}  // namespace torchspan::pipeline_defects_test
