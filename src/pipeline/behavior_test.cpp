// peer: async_pipe async_event_loop, simple_linears: better: values are compared
#include <gmock/gmock.h>

#include <torch/torch.h>

#include "engine/api/grad_field_sink.h"
#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::behavior_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Three dense layers, one per stage.
Layers three() {
  Layers layers;
  for (const std::uint64_t seed : {1u, 2u, 3u}) layers.add<Dense>(seed);
  return layers;
}
struct ThreeTwins {
  Dense a{1u}, b{2u}, c{3u};
  at::Tensor forward(const at::Tensor& x) { return c->forward(b->forward(a->forward(x))); }
  std::vector<std::shared_ptr<torch::nn::Module>> all() const { return {a.ptr(), b.ptr(), c.ptr()}; }
};

// peer: pipe input_pair, input_singleton, non_tensor, non_tensor_tuple: better: numbers, optionals and user
//   structs can be passed too
TEST(PipelineData, TuplesNumbersAndEmptyValuesPassBetweenStages) {
  in_every_way([](PipelineOptions options) {
    on_workers(4, 1, [&](Worker& worker) {
      Layers layers;
      layers.add<Dense>(1u);
      layers.add_function("fork", [](const at::Tensor& x) { return fork(x); });
      layers.add<Scale>(2u);
      layers.add_function("unite", [](const Several& all) { return unite(all); });
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({6, kWidth}, 3), y = seeded({6, kWidth}, 4);
      const double loss = pipe.train_step(x, y, mean_square);

      Dense dense(1u);
      Scale scale(2u);
      const Several forked = fork(dense->forward(x));
      const at::Tensor expected =
          mean_square(unite(std::apply([&](auto&... a) { return scale->forward(a...); }, forked)), y);
      expected.backward();
      EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
      expect_gradients(pipe, {dense.ptr(), nullptr, scale.ptr()});
    });
  });
}

// peer: pipe input_pair
TEST(PipelineData, ATupleOfOneStaysATuple) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add_function("one", [](const at::Tensor& x) { return std::make_tuple(x * 2); });
    layers.add_function("check", [](const Batch& all) {
      EXPECT_TRUE(all.tuple);
      EXPECT_EQ(all.size(), 1u);
      return std::make_tuple(all.tensor() + 1);
    });
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    const Batch output = pipe.infer(at::ones({4, 1}));
    if (worker.rank() == 1) {
      EXPECT_TRUE(output.tuple);
      EXPECT_TRUE(output.tensor().equal(at::full({4, 1}, 3.0)));
    }
  });
}

// peer: pipe batch_size_indivisible, batch_size_small: better: 6 rows in 4 parts give 4 micro-batches, and
//   values are compared
TEST(PipelineData, BatchesThatCannotBeSplitEvenlyAreTrainedWhole) {
  for (const std::int64_t rows : {1, 2, 3, 6, 7, 9}) {
    in_every_way([&](PipelineOptions options) {
      SCOPED_TRACE(rows);
      on_workers(3, 1, [&](Worker& worker) {
        Pipeline pipe(worker, three(), options);
        const at::Tensor x = seeded({rows, kWidth}, 3), y = seeded({rows, kWidth}, 4);
        const double loss = pipe.train_step(x, y, mean_square);
        EXPECT_EQ(pipe.last_step().micro_batches, std::min<std::int64_t>(rows, 4));
        ThreeTwins twins;
        const at::Tensor expected = mean_square(twins.forward(x), y);
        expected.backward();
        EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
        expect_gradients(pipe, twins.all());
      });
    });
  }
}

// peer: pipelining `grad_with_manual` (with and without shape inference): better: every message carries its
//   shapes
// peer: other_pipelines DS `TestPipeDynamicShape`, MG `variable_seq_lengths`: same: always enabled
TEST(PipelineData, ShapesMayChangeFromStepToStep) {
  on_workers(3, 1, [](Worker& worker) {
    Pipeline pipe(worker, three(), {.micro_batches = 3});
    ThreeTwins twins;
    const std::vector<std::vector<std::int64_t>> shapes{
        {6, kWidth}, {4, 5, kWidth}, {9, 2, 2, kWidth}, {1, kWidth}, {6, 1, kWidth}};
    for (const auto& shape : shapes) {
      const at::Tensor x = seeded(shape, 3), y = seeded(shape, 4);
      const double loss = pipe.train_step(x, y, mean_square);
      const at::Tensor expected = mean_square(twins.forward(x), y);
      expected.backward();
      EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
    }
    expect_gradients(pipe, twins.all());
  });
}

// peer: pipelining `stage_backward`, `stage_backward_ignores_*`, view outputs: same
TEST(PipelineData, AnUnusedOutputGetsNoGradient) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Layers layers;
      layers.add<Dense>(1u);
      layers.add_function("fork", [](const at::Tensor& x) { return fork(x); });
      layers.add_function("choose", [](const Several& all) { return choose(all); });
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({8, kWidth}, 3), y = seeded({8, kWidth}, 4);
      pipe.train_step(x, y, mean_square);
      Dense dense(1u);
      mean_square(choose(fork(dense->forward(x))), y).backward();
      expect_gradients(pipe, {dense.ptr()});
    });
  });
}

// peer: pipelining stage_backward
TEST(PipelineData, AWholeStageThatTheLossDoesNotDependOnGetsNoGradient) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Layers layers;
      layers.add<Dense>(1u);
      layers.add_function("cut", [](const at::Tensor& x) { return x.detach(); });
      layers.add<Dense>(2u);
      Pipeline pipe(worker, layers, options);
      pipe.train_step(seeded({8, kWidth}, 3), seeded({8, kWidth}, 4), mean_square);
      if (worker.rank() == 0) {
        EXPECT_FALSE(pipe.parameters()[0].grad().defined());
      }
      if (worker.rank() == 2) {
        EXPECT_TRUE(pipe.parameters()[0].grad().defined());
      }
    });
  });
}

TEST(PipelineData, AFirstStageWithoutParametersIsTrainedThrough) {
  in_every_way([](PipelineOptions options) {
    on_workers(2, 1, [&](Worker& worker) {
      Layers layers;
      layers.add_function("double", [](const at::Tensor& x) { return x * 2; });
      layers.add<Dense>(1u);
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({8, kWidth}, 3), y = seeded({8, kWidth}, 4);
      for (int step = 0; step < 2; ++step) pipe.train_step(x, y, mean_square);
      Dense dense(1u);
      for (int step = 0; step < 2; ++step) mean_square(dense->forward(x * 2), y).backward();
      expect_gradients(pipe, {nullptr, dense.ptr()});
    });
  });
}

TEST(PipelineData, AModelWithoutTrainableParametersIsNoError) {
  in_every_way([](PipelineOptions options) {
    on_workers(2, 1, [&](Worker& worker) {
      Layers layers;
      layers.add_function("double", [](const at::Tensor& x) { return x * 2; });
      layers.add_function("more", [](const at::Tensor& x) { return x + 1; });
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({8, kWidth}, 3);
      EXPECT_NEAR(pipe.train_step(x, x * 2, mean_square), 1, 1e-12);
    });
  });
}

// The pipeline's own input.

TEST(PipelineInput, ThatIsALeafGetsItsGradient) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Pipeline pipe(worker, three(), options);
      const at::Tensor x = seeded({7, kWidth}, 3).set_requires_grad(true), y = seeded({7, kWidth}, 4);
      for (int step = 0; step < 2; ++step) pipe.train_step(x, y, mean_square);
      const at::Tensor plain_x = seeded({7, kWidth}, 3).set_requires_grad(true);
      ThreeTwins twins;
      for (int step = 0; step < 2; ++step) mean_square(twins.forward(plain_x), y).backward();
      if (worker.rank() == 0) expect_close(x.grad(), plain_x.grad());
      if (worker.rank() != 0) {
        EXPECT_FALSE(x.grad().defined());
      }
    });
  });
}

TEST(PipelineInput, ThatIsComputedPassesItsGradientOn) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Pipeline pipe(worker, three(), options);
      const at::Tensor z = seeded({7, kWidth}, 3).set_requires_grad(true), y = seeded({7, kWidth}, 4);
      pipe.train_step(at::sin(z), y, mean_square);
      const at::Tensor plain_z = seeded({7, kWidth}, 3).set_requires_grad(true);
      ThreeTwins twins;
      mean_square(twins.forward(at::sin(plain_z)), y).backward();
      if (worker.rank() == 0) expect_close(z.grad(), plain_z.grad());
    });
  });
}

// peer: async_pipe tuple_wait: same: no transfer is asynchronous to a stream
TEST(PipelineInput, MayHaveGradientsForSomeOfItsMembers) {
  in_every_way([](PipelineOptions options) {
    on_workers(2, 1, [&](Worker& worker) {
      Layers layers;
      layers.add_function("mix", [](const at::Tensor& a, const at::Tensor& index, const at::Tensor& b,
                                    std::int64_t by) { return a * by + at::sin(b) * index; });
      layers.add<Dense>(1u);
      Pipeline pipe(worker, layers, options);
      const at::Tensor a = seeded({6, kWidth}, 3), index = at::arange(6).reshape({6, 1});
      const at::Tensor b = seeded({6, kWidth}, 4).set_requires_grad(true), y = seeded({6, kWidth}, 5);
      pipe.train_step(Batch({a, index, b, std::int64_t{3}}), y, mean_square);
      const at::Tensor plain_b = seeded({6, kWidth}, 4).set_requires_grad(true);
      Dense dense(1u);
      mean_square(dense->forward(a * 3 + at::sin(plain_b) * index), y).backward();
      if (worker.rank() == 0) expect_close(b.grad(), plain_b.grad());
      EXPECT_FALSE(a.grad().defined());
    });
  });
}

TEST(PipelineInput, WithoutRowsGoesToAllMicroBatchesAndGetsTheSumOfTheirGradients) {
  in_every_way([](PipelineOptions options) {
    on_workers(2, 1, [&](Worker& worker) {
      Layers layers;
      layers.add_function("warm", [](const at::Tensor& x, const at::Tensor& heat) { return x * heat; });
      layers.add<Dense>(1u);
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({7, kWidth}, 3), y = seeded({7, kWidth}, 4);
      const at::Tensor heat = seeded({}, 5).set_requires_grad(true);
      pipe.train_step(Batch({x, heat}), y, mean_square);
      const at::Tensor plain = seeded({}, 5).set_requires_grad(true);
      Dense dense(1u);
      mean_square(dense->forward(x * plain), y).backward();
      if (worker.rank() == 0) expect_close(heat.grad(), plain.grad());
    });
  });
}

// Steps of other kinds.

// peer: pipe no_grad, checkpoint_eval: same
// peer: pipelining forward_only, eval_inference_mode, return_output, schedule_eval_then_train,
//   schedule_with_single_stage: same
TEST(PipelineSteps, InferEqualsThePlainModelAndKeepsNoGraph) {
  for (const Schedule schedule : {Schedule::kArrival, Schedule::kGPipe, Schedule::k1F1B}) {
    on_workers(3, 1, [&](Worker& worker) {
      int calls = 0;
      Layers layers = three();
      layers.add_function("watch", [&calls](const at::Tensor& x) {
        ++calls;
        EXPECT_FALSE(torch::GradMode::is_enabled());
        EXPECT_FALSE(x.requires_grad());
        return x * 1;
      });
      Pipeline pipe(worker, layers,
                    {.micro_batches = 4, .schedule = schedule, .checkpoint = ActivationCheckpoint::kAlways});
      const at::Tensor x = seeded({7, kWidth}, 3);
      const Batch output = pipe.infer(x);
      EXPECT_EQ(calls, worker.rank() == 2 ? 4 : 0) << "nothing is computed again";
      if (worker.rank() != 2) {
        EXPECT_EQ(output.size(), 0u);
        return;
      }
      expect_close(output.tensor(), ThreeTwins().forward(x).detach());
      EXPECT_FALSE(output.tensor().requires_grad());
    });
  }
}

// peer: pipe no_grad
TEST(PipelineSteps, WithoutGradientsOnTheFirstWorkerComputeTheLossOnly) {
  on_workers(3, 1, [](Worker& worker) {
    Pipeline pipe(worker, three(), {.micro_batches = 4});
    const at::Tensor x = seeded({7, kWidth}, 3), y = seeded({7, kWidth}, 4);
    {
      const torch::AutoGradMode mode(worker.rank() != 0);
      EXPECT_NEAR(pipe.train_step(x, y, mean_square), mean_square(ThreeTwins().forward(x), y).item<double>(),
                  1e-12);
    }
    for (const at::Tensor& parameter : pipe.parameters()) EXPECT_FALSE(parameter.grad().defined());
    pipe.train_step(x, y, mean_square);
    for (const at::Tensor& parameter : pipe.parameters()) EXPECT_TRUE(parameter.grad().defined());
  });
}

// peer: pipelining forward_only
TEST(PipelineSteps, EvaluationAndTrainingAlternate) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add<torch::nn::Dropout>(0.5);
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    const at::Tensor x = seeded({4, kWidth}, 3), y = seeded({4, kWidth}, 4);
    Dense dense(1u);
    const double plain = mean_square(dense->forward(x), y).item<double>();
    for (int round = 0; round < 2; ++round) {
      pipe.train();
      EXPECT_GT(std::abs(pipe.train_step(x, y, mean_square) - plain), 1e-6) << "dropout is on";
      pipe.eval();
      EXPECT_NEAR(pipe.train_step(x, y, mean_square), plain, 1e-12) << "gradients in evaluation mode";
      const Batch output = pipe.infer(x);
      if (worker.rank() == 1) expect_close(output.tensor(), dense->forward(x).detach());
    }
    mean_square(dense->forward(x), y).backward();
    if (worker.rank() == 1) {
      EXPECT_FALSE(pipe.module(1)->is_training());
    }
  });
}

/// Depends on all rows together; not a sum over micro-batches.
at::Tensor entangled(const at::Tensor& output) {
  return at::matmul(output.t(), output).square().sum().log() + at::logsumexp(output, at::IntArrayRef{0, 1});
}

TEST(PipelineSteps, ForwardAndBackwardTakeALossOverTheWholeBatch) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Pipeline pipe(worker, three(), options);
      const at::Tensor x = seeded({7, kWidth}, 3).set_requires_grad(true);
      const at::Tensor plain_x = seeded({7, kWidth}, 3).set_requires_grad(true);
      ThreeTwins twins;
      for (int step = 0; step < 2; ++step) {
        const Batch output = pipe.forward(x);
        const at::Tensor plain = twins.forward(plain_x);
        if (worker.rank() == 2) {
          EXPECT_TRUE(output.tensor().requires_grad());
          EXPECT_TRUE(output.tensor().is_leaf());
          expect_close(output.tensor().detach(), plain.detach());
          entangled(output.tensor()).backward();
        } else {
          EXPECT_EQ(output.size(), 0u);
        }
        pipe.backward();
        entangled(plain).backward();
      }
      expect_gradients(pipe, twins.all());
      if (worker.rank() == 0) expect_close(x.grad(), plain_x.grad());
    });
  });
}

TEST(PipelineSteps, BackwardTakesGradientsOfSomeOutputs) {
  in_every_way([](PipelineOptions options) {
    on_workers(2, 1, [&](Worker& worker) {
      Layers layers;
      layers.add<Dense>(1u);
      layers.add_function("two", [](const at::Tensor& x) {
        return std::make_tuple(x * 2, at::sin(x), (x > 0).to(at::kLong), x.sum());
      });
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({6, kWidth}, 3), gradient = seeded({6, kWidth}, 4);
      const Batch output = pipe.forward(x);
      const bool last = worker.rank() == 1;
      const at::Tensor sums = at::tensor({1.0, 2.0, 3.0, 4.0}, at::kDouble);
      if (last) {
        EXPECT_EQ(output.members[3].toTensor().size(0), 4) << "a number for each micro-batch";
      }
      pipe.backward(last ? std::vector<at::Tensor>{at::Tensor(), gradient, at::Tensor(), sums}
                         : std::vector<at::Tensor>{});
      Dense dense(1u);
      const at::Tensor plain = dense->forward(x);
      // 6 rows in 4: two of 2, two of 1.
      const at::Tensor by_row = at::tensor({1.0, 1.0, 2.0, 2.0, 3.0, 4.0}, at::kDouble).reshape({6, 1});
      ((at::sin(plain) * gradient).sum() + (plain * by_row).sum()).backward();
      expect_gradients(pipe, {dense.ptr()});
    });
  });
}

// peer: pipelining `multi_iter`, `schedule_with_native_zero_bubble` (accumulation, leak check): better: each
//   step has its own scale
// peer: other_pipelines DS `gradients_are_scaled_once`: same
TEST(PipelineSteps, GradientsAccumulateToTheMeanOfSeveralBatches) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Pipeline pipe(worker, three(), options);
      ThreeTwins twins;
      for (std::uint64_t step = 0; step < 3; ++step) {
        const at::Tensor x = seeded({6, kWidth}, 10 + step), y = seeded({6, kWidth}, 20 + step);
        const double loss = pipe.train_step(x, y, loss_of(mean_square), {.gradient_scale = 1.0 / 3});
        const at::Tensor expected = mean_square(twins.forward(x), y);
        (expected / 3).backward();
        EXPECT_NEAR(loss, expected.item<double>(), 1e-12) << "the loss itself is not scaled";
      }
      expect_gradients(pipe, twins.all());
    });
  });
}

TEST(PipelineSteps, NameBatchesAndLossesThatDoNotFit) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add<Dense>(2u);
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    const at::Tensor x = seeded({6, kWidth}, 3), y = seeded({6, kWidth}, 4);
    EXPECT_THAT(error_text([&] {
                  pipe.train_step(x, seeded({5, kWidth}, 4), mean_square);
                }),
                HasSubstr("the target has 5 rows, the input 6"));
    EXPECT_THAT(error_text([&] {
                  pipe.train_step(at::zeros({0, kWidth}), y, mean_square);
                }),
                HasSubstr("the input has no rows"));
    EXPECT_THAT(error_text([&] {
                  pipe.train_step(x, y, [](const at::Tensor& a, const at::Tensor& b) { return a - b; });
                }),
                HasSubstr("the loss must be a tensor of one element"));
    EXPECT_THAT(error_text([&] { pipe.backward(); }), HasSubstr("without a forward() before it"));
    EXPECT_GT(pipe.train_step(x, y, mean_square), 0) << "and goes on";
  });
}

/// As Optimizer::step_in_backward() adds it.
class StepsInBackward final : public engine::GradientHook {
 public:
  explicit StepsInBackward(const at::Tensor& parameter)
      : GradientHook(parameter, std::make_shared<engine::NativeEnginePasses>()) {}
  engine::GradientUse use() const override { return engine::GradientUse::kSteps; }
  void gradient_ready(engine::GradientSink&, const at::Tensor&) override {}
};

TEST(PipelineSteps, RefuseOptimizersThatStepInBackwardOnAllWorkers) {
  on_workers(3, 1, [](Worker& worker) {
    Pipeline pipe(worker, three(), {.micro_batches = 4});
    const auto leaf = torch::autograd::impl::grad_accumulator(pipe.parameters()[0]);
    if (worker.rank() == 1) leaf->add_post_hook(std::make_unique<StepsInBackward>(pipe.parameters()[0]));
    const at::Tensor before = pipe.parameters()[0].detach().clone();
    const at::Tensor x = seeded({8, kWidth}, 3), y = seeded({8, kWidth}, 4);
    EXPECT_THAT(error_text([&] { pipe.train_step(x, y, mean_square); }),
                AllOf(HasSubstr("parameter 'weight' of layer '"),
                      HasSubstr("' on worker 'worker1' is stepped in backward")));
    EXPECT_TRUE(at::equal(before, pipe.parameters()[0]));
  });
}

// peer: async_pipe reuse_lazy
TEST(PipelineSteps, TrainWithAnOptimizerLikeOneProcess) {
  on_workers(3, 1, [](Worker& worker) {
    Pipeline pipe(worker, three(), {.micro_batches = 4});
    torch::optim::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    ThreeTwins twins;
    std::vector<at::Tensor> all;
    for (const auto& twin : twins.all()) {
      for (const at::Tensor& parameter : twin->parameters()) all.push_back(parameter);
    }
    torch::optim::SGD plain(all, torch::optim::SGDOptions(0.1).momentum(0.9));
    for (std::uint64_t step = 0; step < 5; ++step) {
      const at::Tensor x = seeded({8, kWidth}, 10 + step), y = seeded({8, kWidth}, 20 + step);
      optimizer.zero_grad();
      plain.zero_grad();
      const double loss = pipe.train_step(x, y, mean_square);
      const at::Tensor expected = mean_square(twins.forward(x), y);
      expected.backward();
      optimizer.step();
      plain.step();
      EXPECT_NEAR(loss, expected.item<double>(), 1e-11);
    }
    const auto rank = static_cast<std::size_t>(worker.rank());
    expect_close(pipe.parameters()[0].detach(), twins.all()[rank]->parameters()[0].detach(), 1e-11);
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::behavior_test
