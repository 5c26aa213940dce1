#include <gmock/gmock.h>
#include <map>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::activation_checkpoint_test {
namespace {

using ::testing::HasSubstr;
namespace nn = torch::nn;

/// One row per micro-batch, filled with its number.
at::Tensor numbered(std::int64_t micro_batches) {
  return at::arange(micro_batches, at::kDouble).reshape({micro_batches, 1}).repeat({1, kWidth});
}
int number_of(const at::Tensor& x) { return static_cast<int>(x.flatten()[0].item<double>()); }

PipelineOptions with(ActivationCheckpoint checkpoint, int micro_batches = 4) {
  PipelineOptions options;
  options.micro_batches = micro_batches;
  options.checkpoint = checkpoint;
  return options;
}

/// A layer with parameters that records the micro-batches that it sees.
struct CountingImpl : nn::Module {
  explicit CountingImpl(std::map<int, int>* count) : forwards(count) {
    weight = register_parameter("weight", at::ones({kWidth}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    ++(*forwards)[number_of(x)];
    return x * weight;
  }
  std::map<int, int>* forwards;
  at::Tensor weight;
};
TORCH_MODULE(Counting);

/// Forwards by micro-batch on the first and the last of three stages.
std::vector<std::map<int, int>> count_forwards(PipelineOptions options, bool train = true) {
  std::vector<std::map<int, int>> forwards(3);
  on_workers(3, 1, [&](Worker& worker) {
    Layers layers;
    for (auto& each : forwards) layers.add<Counting>(&each);
    Pipeline pipe(worker, layers, options);
    pipe.train(train);
    pipe.train_step(numbered(options.micro_batches), numbered(options.micro_batches), mean_square);
  });
  return forwards;
}

// peer: pipe checkpoint_mode, checkpoint_mode_when_chunks_1: same
TEST(PipelineCheckpoint, RecomputesTheMicroBatchesOfItsMode) {
  using Counts = std::map<int, int>;
  for (const auto& each : count_forwards(with(ActivationCheckpoint::kNever)))
    EXPECT_EQ(each, (Counts{{0, 1}, {1, 1}, {2, 1}, {3, 1}}));
  for (const auto& each : count_forwards(with(ActivationCheckpoint::kExceptLast)))
    EXPECT_EQ(each, (Counts{{0, 2}, {1, 2}, {2, 2}, {3, 1}}));
  for (const auto& each : count_forwards(with(ActivationCheckpoint::kAlways)))
    EXPECT_EQ(each, (Counts{{0, 2}, {1, 2}, {2, 2}, {3, 2}}));
}

// peer: pipe checkpoint_mode
TEST(PipelineCheckpoint, OfASingleMicroBatch) {
  using Counts = std::map<int, int>;
  EXPECT_EQ(count_forwards(with(ActivationCheckpoint::kNever, 1))[1], (Counts{{0, 1}}));
  EXPECT_EQ(count_forwards(with(ActivationCheckpoint::kExceptLast, 1))[1], (Counts{{0, 1}}));
  EXPECT_EQ(count_forwards(with(ActivationCheckpoint::kAlways, 1))[1], (Counts{{0, 2}}));
}

// peer: pipe checkpoint_mode
TEST(PipelineCheckpoint, UsesTheActualNumberOfMicroBatches) {
  // 2 rows in 4: the second is the last.
  std::map<int, int> forwards;
  on_workers(1, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Counting>(&forwards);
    Pipeline pipe(worker, layers, with(ActivationCheckpoint::kExceptLast));
    pipe.train_step(numbered(2), numbered(2), mean_square);
  });
  EXPECT_EQ(forwards, (std::map<int, int>{{0, 2}, {1, 1}}));
}

// peer: pipe test_checkpoint serial_checkpoints
TEST(PipelineCheckpoint, DoesNotRecomputeLayersWithoutGradients) {
  int calls = 0;
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    layers.add_function("nothing to learn", [&calls](const at::Tensor& x) {
      ++calls;
      return x * 2;
    });
    layers.add<Dense>(1u);
    Pipeline pipe(worker, layers, with(ActivationCheckpoint::kAlways));
    pipe.train_step(numbered(4), numbered(4), mean_square);
  });
  EXPECT_EQ(calls, 4);
}

// peer: pipe test_checkpoint `serial_checkpoints`, `not_requires_grad`, `not_requires_grad_with_parameter`,
//   `detect_checkpointing_recomputing`: same; there is no `is_recomputing()`; use gradient mode
TEST(PipelineCheckpoint, EnablesGradModeOnlyInTheRecomputation) {
  std::vector<bool> recorded;
  on_workers(1, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("watch", [&recorded](const at::Tensor& x) {
      recorded.push_back(torch::GradMode::is_enabled());
      EXPECT_EQ(x.requires_grad(), torch::GradMode::is_enabled());
      return x * 1;
    });
    Pipeline pipe(worker, layers, with(ActivationCheckpoint::kAlways, 1));
    pipe.train_step(numbered(1), numbered(1), mean_square);
  });
  EXPECT_EQ(recorded, (std::vector<bool>{false, true}));
}

// Random numbers.

/// Masks of a dropout behind a layer that learns, by micro-batch, in the order of its forwards.
std::map<int, std::vector<at::Tensor>> masks(PipelineOptions options) {
  std::map<int, std::vector<at::Tensor>> seen;
  on_workers(2, 1, [&](Worker& worker) {
    std::map<int, int> forwards;
    Layers layers;
    layers.add<Counting>(&forwards);
    layers.add<Counting>(&forwards);
    layers.add_function("drop", [&seen](const at::Tensor& x) {
      const at::Tensor mask = at::dropout(at::ones({32}, at::kDouble), 0.5, true);
      seen[number_of(x.detach())].push_back(mask);
      return x * mask.sum();
    });
    options.balance = {1, 2};
    Pipeline pipe(worker, layers, options);
    pipe.train_step(numbered(4), numbered(4), mean_square);
  });
  return seen;
}

// peer suite: pipe random_in_checkpoint, parallel_randoms: better: a seed gives the same masks in every
//   schedule and mode
TEST(PipelineRandom, ARepeatedForwardDrawsTheSameNumbers) {
  for (const bool seeded : {false, true}) {
    PipelineOptions options = with(ActivationCheckpoint::kAlways);
    if (seeded) options.seed = 5;
    auto seen = masks(options);
    ASSERT_EQ(seen.size(), 4u);
    for (const auto& [micro_batch, each] : seen) {
      ASSERT_EQ(each.size(), 2u);
      EXPECT_TRUE(each[0].equal(each[1])) << "micro-batch " << micro_batch;
    }
    EXPECT_FALSE(seen[0][0].equal(seen[1][0])) << "micro-batches have different masks";
  }
}

TEST(PipelineRandom, ASeedMakesTheMasksWhateverTheScheduleAndTheMode) {
  PipelineOptions options = with(ActivationCheckpoint::kNever);
  options.seed = 5;
  const auto expected = masks(options);
  in_every_way([&](PipelineOptions each) {
    each.seed = 5;
    for (const auto& [micro_batch, all] : masks(each))
      EXPECT_TRUE(all[0].equal(expected.at(micro_batch)[0])) << "micro-batch " << micro_batch;
  });
}

/// The next number of LibTorch's generator after a step of a model with dropout. The last forward to be
/// repeated is not the last one.
double drawn_after_step(PipelineOptions options) {
  options.schedule = Schedule::kGPipe;
  double drawn = 0;
  on_workers(1, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add<nn::Dropout>(0.5);
    Pipeline pipe(worker, layers, options);
    torch::manual_seed(3);
    pipe.train_step(numbered(4), numbered(4), mean_square);
    drawn = at::rand({1}, at::kDouble).item<double>();
  });
  return drawn;
}

TEST(PipelineRandom, RepeatedForwardsTakeNoNumbersFromOutside) {
  EXPECT_EQ(drawn_after_step(with(ActivationCheckpoint::kAlways)),
            drawn_after_step(with(ActivationCheckpoint::kNever)));
}

TEST(PipelineRandom, UnderASeedTheGeneratorOutsideIsUntouched) {
  torch::manual_seed(3);
  const double expected = at::rand({1}, at::kDouble).item<double>();
  PipelineOptions options = with(ActivationCheckpoint::kAlways);
  options.seed = 9;
  EXPECT_EQ(drawn_after_step(options), expected);
}

TEST(PipelineRandom, TheLossDrawsTheSameNumbersAgainUnderAnySplit) {
  const auto noisy = [](const at::Tensor& output, const at::Tensor& target) {
    return (at::dropout(output, 0.5, true) - target).square().mean();
  };
  const at::Tensor x = seeded({6, kWidth}, 3), y = seeded({6, kWidth}, 4);
  in_every_way([&](PipelineOptions options) {
    for (const int workers : {1, 2}) {
      on_workers(workers, 1, [&](Worker& worker) {
        options.seed = 5;
        Layers layers;
        layers.add<Dense>(1u);
        layers.add<Dense>(2u);
        Pipeline pipe(worker, layers, options);
        const double loss = pipe.train_step(x, y, noisy);
        Dense a(1u), b(2u);
        at::Tensor expected = at::zeros({}, at::kDouble);
        const auto xs = x.tensor_split(4), ys = y.tensor_split(4);
        for (int i = 0; i < 4; ++i) {
          const auto piece = static_cast<std::size_t>(i);
          const at::Tensor output = b->forward(a->forward(xs[piece]));
          torch::manual_seed(seed_of_use(5, 0, 2, i));
          expected = expected + noisy(output, ys[piece]) * static_cast<double>(xs[piece].size(0)) / 6.0;
        }
        expected.backward();
        EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
        expect_gradients(pipe, {a.ptr(), b.ptr()});
      });
    }
  });
}

TEST(PipelineRandom, StepsUseOrdersAndMicroBatchesHaveSeedsOfTheirOwn) {
  std::map<std::uint64_t, int> seeds;
  for (std::uint64_t step = 0; step < 10; ++step) {
    for (int order = 0; order < 10; ++order) {
      for (int micro_batch = 0; micro_batch < 10; ++micro_batch)
        ++seeds[seed_of_use(7, step, order, micro_batch)];
    }
  }
  EXPECT_EQ(seeds.size(), 1000u);
  EXPECT_NE(seed_of_use(7, 0, 0, 0), seed_of_use(8, 0, 0, 0));
}

// Side effects of a repeated forward.

// peer: pipe forward_lockstep
TEST(PipelineCheckpoint, RefusesLayersThatChangeTheirInputInPlace) {
  const auto run = [](ActivationCheckpoint checkpoint) {
    std::vector<std::string> texts(2);
    on_workers(2, 1, [&](Worker& worker) {
      Layers layers;
      layers.add<Dense>(1u);
      layers.add_function("in place", [](at::Tensor x) { return x.add_(1); }).named("adder");
      layers.add<Dense>(2u);
      PipelineOptions options = with(checkpoint, 2);
      options.balance = {1, 2};
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({4, kWidth}, 3), y = seeded({4, kWidth}, 4);
      texts[static_cast<std::size_t>(worker.rank())] =
          error_text([&] { pipe.train_step(x, y, mean_square); });
    });
    return texts;
  };
  for (const std::string& text : run(ActivationCheckpoint::kAlways)) {
    EXPECT_THAT(text, HasSubstr("changed the input of a checkpointed layer range in place"));
    EXPECT_THAT(text, HasSubstr("adder"));
    EXPECT_THAT(text, HasSubstr("use ActivationCheckpoint::kNever"));
  }
}

// peer: pipe `forward_lockstep`, `inplace_on_requires_grad` (expected to fail): better: works without
//   checkpointing; with it, an error says what to do
TEST(PipelineCheckpoint, AllowsInPlaceChangesIfItIsOff) {
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("adder", [](at::Tensor x) { return x.add_(1); });
    layers.add<Dense>(2u);
    PipelineOptions options = with(ActivationCheckpoint::kNever, 2);
    options.balance = {1, 2};
    Pipeline pipe(worker, layers, options);
    const at::Tensor x = seeded({4, kWidth}, 3), y = seeded({4, kWidth}, 4);
    pipe.train_step(x, y, mean_square);
    Dense a(1u), b(2u);
    mean_square(b->forward(a->forward(x) + 1), y).backward();
    expect_gradients(pipe, {a.ptr(), nullptr, b.ptr()});
  });
}

TEST(PipelineCheckpoint, RefusesLossesThatChangeTheirTargetInPlaceUnlessItIsOff) {
  const auto loss = [](const at::Tensor& output, at::Tensor target) {
    return mean_square(output, target.div_(10));
  };
  std::vector<std::string> texts(2);
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add<Dense>(2u);
    const at::Tensor x = seeded({4, kWidth}, 3), y = seeded({4, kWidth}, 4);
    {
      Pipeline pipe(worker, layers, with(ActivationCheckpoint::kExceptLast, 2));
      texts[static_cast<std::size_t>(worker.rank())] =
          error_text([&] { pipe.train_step(x, y.clone(), loss); });
    }
    Pipeline pipe(worker, layers, with(ActivationCheckpoint::kNever, 2));
    pipe.train_step(x, y.clone(), loss);
    Dense a(1u), b(2u);
    mean_square(b->forward(a->forward(x)), y / 10).backward();
    expect_gradients(pipe, {a.ptr(), b.ptr()});
  });
  for (const std::string& text : texts) {
    EXPECT_THAT(text, HasSubstr("or the loss changed its target, so its forward cannot be recomputed"));
    EXPECT_THAT(text, HasSubstr("stage 1 on 'worker1'"));
  }
}

// The peer crashed where the first output takes no gradient and only another is used.
// peer: pipe non_grad_output, checkpoint_non_float_input: better: the peer's fails when the first output
//   takes no gradient
TEST(PipelineCheckpoint, WorksWhenTheFirstOutputTakesNoGradient) {
  for (const bool integer : {false, true}) {
    in_every_way([&](PipelineOptions options) {
      on_workers(2, 1, [&](Worker& worker) {
        Layers layers;
        layers.add<Dense>(1u);
        layers.add_function("two", [integer](const at::Tensor& x) {
          return std::make_tuple(integer ? (x.detach() > 0).to(at::kLong) : x.detach(), at::sin(x));
        });
        layers.add_function("second", [](const at::Tensor&, const at::Tensor& b) { return b * 2; });
        options.balance = {2, 1};
        Pipeline pipe(worker, layers, options);
        const at::Tensor x = seeded({8, kWidth}, 3), y = seeded({8, kWidth}, 4);
        pipe.train_step(x, y, mean_square);
        Dense dense(1u);
        mean_square(at::sin(dense->forward(x)) * 2, y).backward();
        expect_gradients(pipe, {dense.ptr()});
      });
    });
  }
}

TEST(PipelineCheckpoint, DoesNotCountTwiceInAPlainBatchNorm) {
  for (const ActivationCheckpoint checkpoint :
       {ActivationCheckpoint::kNever, ActivationCheckpoint::kExceptLast, ActivationCheckpoint::kAlways}) {
    on_workers(1, 1, [&](Worker& worker) {
      nn::BatchNorm1d norm(kWidth), plain(kWidth);
      norm->to(at::kDouble);
      plain->to(at::kDouble);
      Layers layers;
      layers.add_existing(norm);
      Pipeline pipe(worker, layers, with(checkpoint));
      const at::Tensor x = seeded({12, kWidth}, 3), y = seeded({12, kWidth}, 4);
      for (int step = 0; step < 2; ++step) {
        pipe.train_step(x, y, mean_square);
        for (const at::Tensor& chunk : x.tensor_split(4)) plain->forward(chunk);
      }
      EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 8);
      expect_close(norm->running_mean, plain->running_mean);
      expect_close(norm->running_var, plain->running_var);
    });
  }
}

struct WrappedNormImpl : nn::Module {
  WrappedNormImpl() { norm = register_module("norm", nn::BatchNorm1d(kWidth)); }
  at::Tensor forward(const at::Tensor& x) { return norm->forward(x); }
  nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(WrappedNorm);

TEST(PipelineCheckpoint, DoesNotCountTwiceInATrainingNormOfALayerInEvaluationMode) {
  on_workers(1, 1, [](Worker& worker) {
    WrappedNorm layer;
    layer->to(at::kDouble);
    layer->eval();
    layer->norm->train();
    Layers layers;
    layers.add_existing(layer);
    Pipeline pipe(worker, layers, with(ActivationCheckpoint::kAlways));
    pipe.train_step(seeded({12, kWidth}, 3), seeded({12, kWidth}, 4), mean_square);
    EXPECT_EQ(layer->norm->num_batches_tracked.item<std::int64_t>(), 4);
  });
}

// A function may use a parameter that no module of the pipeline has.
// peer: pipe test_checkpoint serial_checkpoints
TEST(PipelineCheckpoint, GivesUserTensorsTheirGradients) {
  in_every_way([](PipelineOptions options) {
    on_workers(2, 1, [&](Worker& worker) {
      const at::Tensor mine = seeded({kWidth}, 7).set_requires_grad(true);
      Layers layers;
      layers.add_function("mine", [mine](const at::Tensor& x) { return at::tanh(x * mine); });
      layers.add<Dense>(1u);
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({8, kWidth}, 3), y = seeded({8, kWidth}, 4);
      pipe.train_step(x, y, mean_square);
      const at::Tensor plain = seeded({kWidth}, 7).set_requires_grad(true);
      Dense dense(1u);
      mean_square(dense->forward(at::tanh(x * plain)), y).backward();
      if (worker.rank() == 0) expect_close(mine.grad(), plain.grad());
      expect_gradients(pipe, {nullptr, dense.ptr()});
    });
  });
}

// The input of a layer with parameters may be an integer.
// peer: pipe non_grad_output
TEST(PipelineCheckpoint, AcceptsNonFloatInputs) {
  in_every_way([](PipelineOptions options) {
    on_workers(2, 1, [&](Worker& worker) {
      nn::Embedding embedding(9, kWidth), plain(9, kWidth);
      {
        const torch::NoGradGuard guard;
        embedding->to(at::kDouble);
        plain->to(at::kDouble);
        plain->weight.copy_(seeded({9, kWidth}, 6));
        embedding->weight.copy_(plain->weight);
      }
      Layers layers;
      layers.add_existing(embedding);
      layers.add<Dense>(1u);
      Pipeline pipe(worker, layers, options);
      const at::Tensor words = at::arange(8).remainder(5), y = seeded({8, kWidth}, 4);
      pipe.train_step(words, y, mean_square);
      Dense dense(1u);
      mean_square(dense->forward(plain->forward(words)), y).backward();
      expect_gradients(pipe, {plain.ptr(), dense.ptr()});
    });
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::activation_checkpoint_test
