// Overlapped steps (PipelineOptions::staleness) against the same delayed updates in one process: step t computes its
// gradients with the parameters before the update by those of step t - 1.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <initializer_list>
#include <optional>
#include <random>

#include <torch/torch.h>

#include <torchspan/pipeline/deferred_batch_norm.h>

#include "pipeline/pipeline_test_util.h"
#include "tests/support/environment.h"

namespace torchspan::pipeline::testing::staleness_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Multiplies by a transposed matrix, which may be tied to that of the first layer.
struct ProjectionImpl : torch::nn::Module {
  ProjectionImpl() { weight = register_parameter("weight", seeded({kWidth, kWidth}, 77)); }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(Projection);

struct Case {
  int stages = 2;
  int replicas = 1;
  bool tied = false;
  int stages_per_worker = 1;
  int workers() const { return stages * replicas / stages_per_worker; }
};

/// Dense layers and a projection; one layer for each stage.
Layers model_of(const Case& shape) {
  Layers layers;
  const auto first = layers.add<Dense>(1u);
  for (int layer = 1; layer + 1 < shape.stages; ++layer)
    layers.add<Dense>(static_cast<std::uint64_t>(layer) + 1);
  const auto last = layers.add<Projection>();
  if (shape.tied) layers.tie({{first, "weight"}, {last, "weight"}});
  return layers;
}

at::Tensor data_of(int replica, int step, std::uint64_t what) {
  return seeded({3 + (step * 3 + replica * 5) % 6, kWidth},
                what + 100 * static_cast<std::uint64_t>(step) + static_cast<std::uint64_t>(replica));
}
at::Tensor data_of_all(const Case& shape, int step, std::uint64_t what) {
  std::vector<at::Tensor> all;
  for (int replica = 0; replica < shape.replicas; ++replica) all.push_back(data_of(replica, step, what));
  return at::cat(all);
}

/// The same training in one process. `parameters` are those that the optimizer updates; a batch is computed with copies
/// that were made when it began.
class DelayedTraining {
 public:
  explicit DelayedTraining(const Case& shape) : shape_(shape) {
    for (int layer = 0; layer + 1 < shape.stages; ++layer) {
      const Dense dense(static_cast<std::uint64_t>(layer) + 1);
      parameters.push_back(dense->weight);
      parameters.push_back(dense->bias);
    }
    if (!shape.tied) parameters.push_back(Projection()->weight);
  }
  /// Begins batch `step`, and ends the one before: adds its gradients to `.grad` and returns its loss.
  double begin(int step) {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& parameter : parameters)
      copies.push_back(parameter.detach().clone().set_requires_grad(true));
    const double loss = end(step - 1);
    stashed_ = copies;
    return loss;
  }
  double end(int step) {
    if (stashed_.empty()) return std::nan("");
    at::Tensor x = data_of_all(shape_, step, 1);
    for (int layer = 0; layer + 1 < shape_.stages; ++layer) {
      const auto place = 2 * static_cast<std::size_t>(layer);
      x = at::tanh(at::matmul(x, stashed_[place]) + stashed_[place + 1]);
    }
    x = at::matmul(x, (shape_.tied ? stashed_.front() : stashed_.back()).t());
    const at::Tensor loss = mean_square(x, data_of_all(shape_, step, 50));
    const auto gradients = torch::autograd::grad({loss}, stashed_);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor& field = parameters[i].mutable_grad();
      field = field.defined() ? field + gradients[i] : gradients[i].clone();
    }
    stashed_.clear();
    return loss.item<double>();
  }
  /// The parameter of a layer of the pipeline, by its place in the layer.
  at::Tensor of(int layer, std::size_t place) const {
    if (layer + 1 < shape_.stages) return parameters[static_cast<std::size_t>(2 * layer) + place];
    return shape_.tied ? parameters.front() : parameters.back();
  }

  std::vector<at::Tensor> parameters;

 private:
  const Case shape_;
  std::vector<at::Tensor> stashed_;
};

PipelineOptions overlapping(PipelineOptions options, const Case& shape) {
  options.balance.assign(static_cast<std::size_t>(shape.stages), 1);
  options.replicas = shape.replicas;
  options.staleness = 1;
  return options;
}

void expect_same_state(const Pipeline& pipe, const DelayedTraining& expected, int stages) {
  for (int layer = 0; layer < stages; ++layer) {
    const auto module = pipe.module(layer);
    if (!module) continue;
    const auto parameters = module->parameters();
    for (std::size_t place = 0; place < parameters.size(); ++place) {
      SCOPED_TRACE(fmt::format("layer {}, parameter {}", layer, place));
      expect_close(parameters[place].detach(), expected.of(layer, place).detach());
      expect_close(parameters[place].grad(), expected.of(layer, place).grad());
    }
  }
}

void expect_delayed_training(const Case& shape, const PipelineOptions& options, bool accumulates = false) {
  on_workers(shape.workers(), 1, [&](Worker& worker) {
    Pipeline pipe(worker, model_of(shape), overlapping(options, shape));
    DelayedTraining expected(shape);
    torch::optim::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.2).momentum(0.5));
    torch::optim::SGD plain(expected.parameters, torch::optim::SGDOptions(0.2).momentum(0.5));
    const auto update = [&](int step) {
      expect_same_state(pipe, expected, shape.stages);
      if (accumulates && step % 2 == 1) return;  // the gradients of two steps add up
      if (step > 0) {
        EXPECT_NEAR(pipe.clip_grad_norm(0.3), torch::nn::utils::clip_grad_norm_(expected.parameters, 0.3),
                    1e-12);
      }
      optimizer.step();
      plain.step();
      optimizer.zero_grad();
      plain.zero_grad();
    };
    constexpr int kSteps = 6;
    for (int step = 0; step < kSteps; ++step) {
      const double loss =
          pipe.train_step(data_of(pipe.replica(), step, 1), data_of(pipe.replica(), step, 50), mean_square);
      const double other = expected.begin(step);
      EXPECT_EQ(std::isnan(loss), step == 0);
      if (step > 0) {
        EXPECT_NEAR(loss, other, 1e-12) << "step " << step;
        EXPECT_EQ(pipe.last_step().step, static_cast<std::uint64_t>(step) - 1);
      }
      update(step);
    }
    EXPECT_NEAR(pipe.finish(), expected.end(kSteps - 1), 1e-12);
    update(kSteps);
    expect_same_state(pipe, expected, shape.stages);
    EXPECT_TRUE(std::isnan(pipe.finish())) << "nothing is in flight";
  });
}

TEST(Staleness, TrainsLikeDelayedUpdatesInOneProcessUnderEverySchedule) {
  in_every_way([](const PipelineOptions& options) {
    if (options.schedule == Schedule::kArrival) return;
    for (const Case& shape : {Case{2}, Case{3, 1, true}, Case{2, 2, true}}) {
      SCOPED_TRACE(fmt::format("{} stages, {} replicas", shape.stages, shape.replicas));
      expect_delayed_training(shape, options);
    }
  });
}

TEST(Staleness, TrainsLikeDelayedUpdatesWithSeveralStagesOnAWorker) {
  for (const Schedule schedule :
       {Schedule::kInterleaved, Schedule::kZB1P, Schedule::kZBV, Schedule::kDualPipeV}) {
    SCOPED_TRACE(static_cast<int>(schedule));
    expect_delayed_training({4, 1, true, 2}, {.micro_batches = 4, .schedule = schedule});
    expect_delayed_training({4, 2, true, 2}, {.micro_batches = 4, .schedule = schedule});
  }
}

TEST(Staleness, KeepsGradientsOfEarlierSteps) {
  expect_delayed_training({2}, {.micro_batches = 2}, true);
  expect_delayed_training({2, 2, true}, {.micro_batches = 2, .schedule = Schedule::kZBH1}, true);
}

TEST(Staleness, WorksWithOneWorkerAndOneMicroBatch) {
  expect_delayed_training({2, 1, true, 2}, {.workers = {"worker0", "worker0"}, .micro_batches = 1});
  expect_delayed_training({3, 1, true}, {.micro_batches = 1});
}

TEST(Staleness, ConvergesOnARegression) {
  on_workers(3, 1, [](Worker& worker) {
    Layers layers;
    for (int layer = 0; layer < 3; ++layer)
      layers.add<torch::nn::Linear>(torch::nn::LinearOptions(4, 4).bias(false));
    Pipeline pipe(worker, layers, {.balance = {1, 1, 1}, .micro_batches = 4, .staleness = 1});
    for (const at::Tensor& weight : pipe.parameters()) weight.set_data(at::eye(4));
    torch::optim::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.1));
    const at::Tensor x = seeded({32, 4}, 1).to(at::kFloat);
    const at::Tensor y = x + 0.2 * x.matmul(seeded({4, 4}, 2).to(at::kFloat));
    double first = 0, last = 0;
    for (int step = 0; step < 400; ++step) {
      optimizer.zero_grad();
      last = pipe.train_step(x, y, mean_square);
      if (step == 1) first = last;
      optimizer.step();
    }
    EXPECT_GT(first, 0.01);
    EXPECT_LT(last, first / 100);
    pipe.finish();
  });
}

/// Counts the tensors that graphs hold.
struct HeldCount {
  std::atomic<int> forwards{0}, held{0}, most{0};
};

/// A layer whose graph holds one counted tensor.
std::function<at::Tensor(const at::Tensor&)> holds_one(HeldCount& count) {
  return [&count](const at::Tensor& x) {
    auto* memory = new std::vector<double>(static_cast<std::size_t>(x.numel()), 1.0);
    ++count.forwards;
    const int held = ++count.held;
    if (held > count.most) count.most = held;
    return x * at::from_blob(
                   memory->data(), x.sizes(),
                   [memory, &count](void*) {
                     --count.held;
                     delete memory;
                   },
                   at::kDouble);
  };
}

TEST(Staleness, OverlapsStepsAndHoldsNoMoreActivationsThanOneStep) {
  std::vector<HeldCount> counts(3);
  std::atomic<int> early{0};
  on_workers(3, 1, [&](Worker& worker) {
    Layers layers;
    for (std::uint64_t stage = 0; stage < 3; ++stage) {
      layers.add<Dense>(stage + 1);
      layers.add_function("holds",
                          [hold = holds_one(counts[stage])](const at::Tensor& x) { return hold(x); });
    }
    Pipeline pipe(worker, layers,
                  {.balance = {2, 2, 2},
                   .micro_batches = 6,
                   .checkpoint = ActivationCheckpoint::kNever,
                   .staleness = 1});
    HeldCount& mine = counts[static_cast<std::size_t>(worker.rank())];
    const at::Tensor rows = seeded({12, kWidth}, 3);
    for (int step = 0; step < 20; ++step) {
      pipe.train_step(rows, rows, mean_square);
      EXPECT_GE(mine.forwards.load(), 6 * step);
      early += mine.forwards - 6 * step;
    }
    pipe.finish();
    EXPECT_EQ(mine.forwards.load(), 6 * 20);
    EXPECT_EQ(mine.held.load(), 0);
  });
  EXPECT_GT(early.load(), 0) << "no forward of a step ran before the step before it had ended";
  for (std::size_t stage = 0; stage < 3; ++stage)
    EXPECT_LE(counts[stage].most.load(), 3 - static_cast<int>(stage)) << "stage " << stage;
}

TEST(Staleness, AFailureEndsTheCallsThatReturnItsBatchOnAllWorkers) {
  for (const int failing : {0, 1, 2}) {
    SCOPED_TRACE(failing);
    on_workers(3, 1, [&](Worker& worker) {
      Layers layers;
      for (int stage = 0; stage < 3; ++stage) {
        layers.add<Dense>(static_cast<std::uint64_t>(stage) + 1);
        layers.add_function("fails", [fails = stage == failing](const at::Tensor& x) -> at::Tensor {
          if (fails && x.size(1) == kWidth && x.size(0) == 5) throw std::runtime_error("five rows");
          return x * 1;
        });
      }
      Pipeline pipe(worker, layers, {.balance = {2, 2, 2}, .micro_batches = 2, .staleness = 1});
      const auto train = [&](std::int64_t rows) {
        return pipe.train_step(seeded({rows, kWidth}, 1), seeded({rows, kWidth}, 2), mean_square);
      };
      for (int round = 0; round < 3; ++round) {
        EXPECT_TRUE(std::isnan(train(8)));
        EXPECT_FALSE(std::isnan(train(10)));  // begins the batch that fails; ends the first
        std::vector<at::Tensor> gradients, values;
        for (const at::Tensor& parameter : pipe.parameters()) {
          gradients.push_back(parameter.grad().clone());
          values.push_back(parameter.detach().clone());
        }
        EXPECT_THAT(error_text([&] { round == 1 ? pipe.finish() : train(8); }),
                    AllOf(HasSubstr("five rows"), HasSubstr("'fails'")));
        for (std::size_t i = 0; i < gradients.size(); ++i) {
          EXPECT_TRUE(at::equal(pipe.parameters()[i].grad(), gradients[i]));
          EXPECT_TRUE(at::equal(pipe.parameters()[i].detach(), values[i]));
        }
      }
      EXPECT_TRUE(std::isnan(train(8)));
      EXPECT_FALSE(std::isnan(pipe.finish()));
    });
  }
}

enum class FailsIn { kForward, kBackward, kLoss, kInput, kTarget };

/// Throws in the backward of a micro-batch.
struct FailingBackward : torch::autograd::Function<FailingBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("planted");
  }
};

/// A training in which one batch fails in one replica. Batches have 8 rows, and that one has 12, by which layers know it.
struct FailingBatch {
  std::uint64_t seed;
  std::mt19937_64 random{seed};
  Schedule schedule =
      one_of<Schedule>({Schedule::kGPipe, Schedule::k1F1B, Schedule::kZBH1, Schedule::kInterleaved,
                        Schedule::kZB1P, Schedule::kZBV, Schedule::kDualPipeV});
  int stages_per_worker = schedule <= Schedule::k1F1B || schedule == Schedule::kZBH1 ? 1 : 2;
  int stages = stages_per_worker == 2 ? 4 : one_of({2, 3, 4});
  int micro_batches = stages_per_worker == 2 ? 4 : one_of({1, 2, 3, 4});
  int replicas = one_of({1, 2});
  ActivationCheckpoint checkpoint = one_of(
      {ActivationCheckpoint::kNever, ActivationCheckpoint::kExceptLast, ActivationCheckpoint::kAlways});
  bool tied = one_of({false, true});
  bool slow = one_of({false, true});  ///< layers and workers take random times
  FailsIn place =
      one_of({FailsIn::kForward, FailsIn::kBackward, FailsIn::kLoss, FailsIn::kInput, FailsIn::kTarget});
  int step = one_of({0, 1, 2, 3});
  int stage = one_of({0, 1, 2, 3}) % stages;
  int replica = one_of({0, 1}) % replicas;
  int micro_batch = one_of({0, 1, 2, 3}) % micro_batches;

  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[random() % choices.size()];
  }
  std::string text() const {
    return fmt::format(
        "TORCHSPAN_SEED={} TORCHSPAN_CASES=1: schedule {}, {} stages, {} micro-batches, {} replicas, "
        "checkpoint {}, "
        "tied {}, slow {}; batch {} of replica {} fails in place {} of stage {}, micro-batch {}",
        seed, static_cast<int>(schedule), stages, micro_batches, replicas, static_cast<int>(checkpoint), tied,
        slow, step, replica, static_cast<int>(place), stage, micro_batch);
  }
  PipelineOptions options() const {
    PipelineOptions options{.micro_batches = micro_batches, .schedule = schedule, .checkpoint = checkpoint};
    options.balance.assign(static_cast<std::size_t>(stages), 2);
    options.replicas = replicas;
    options.staleness = 1;
    return options;
  }
  /// Dense layers, each with a function behind it that calls `delay`, and fails where the batch does.
  Layers layers(const std::function<void()>& delay) const {
    Layers layers;
    std::vector<TiedParameter> weights;
    for (int at = 0; at < stages; ++at) {
      weights.emplace_back(layers.add<Dense>(static_cast<std::uint64_t>(at) + 1), "weight");
      auto earlier = std::make_shared<int>(0);
      layers.add_function("fails", [=, self = *this](const at::Tensor& x) -> at::Tensor {
        delay();
        const bool fails =
            at == self.stage && x.size(0) * self.micro_batches == 12 && (*earlier)++ >= self.micro_batch;
        if (fails && self.place == FailsIn::kForward) throw std::runtime_error("planted");
        return fails && self.place == FailsIn::kBackward ? FailingBackward::apply(x) : x * 1;
      });
    }
    if (tied) layers.tie({weights.front(), weights.back()});
    return layers;
  }
  double train_step(Pipeline& pipe, int at, bool fails) const {
    fails = fails && pipe.replica() == replica;
    const auto rows = [&](int count, int what) {
      const int seed = 1000 * what + 2 * at + pipe.replica();
      return seeded({count, kWidth}, static_cast<std::uint64_t>(seed));
    };
    const Batch input = fails && place == FailsIn::kInput ? Batch() : Batch(rows(fails ? 12 : 8, 1));
    const Batch target = rows(!fails ? 8 : place == FailsIn::kTarget ? 3 : 12, 2);
    const bool loss_fails = fails && place == FailsIn::kLoss;
    return pipe.train_step(input, target, loss_of([=](const at::Tensor& output, const at::Tensor& expected) {
                             if (loss_fails) throw std::runtime_error("planted");
                             return mean_square(output, expected);
                           }));
  }
};

/// The loss and gradients of one batch on this worker.
struct BatchResult {
  double loss;
  std::vector<at::Tensor> gradients;
};

/// Calls `step` without earlier gradients.
BatchResult result_of(const Pipeline& pipe, const std::function<double()>& step) {
  for (const at::Tensor& parameter : pipe.parameters()) parameter.mutable_grad() = at::Tensor();
  BatchResult result{step(), {}};
  for (const at::Tensor& parameter : pipe.parameters()) result.gradients.push_back(parameter.grad());
  return result;
}

void expect_all_batches_but_one(Worker& worker, const FailingBatch& test) {
  std::mt19937_64 random(test.seed * 100 + static_cast<std::uint64_t>(worker.rank()));
  const auto delay = [&] {
    if (test.slow) worker.runtime().executor.sleep(std::chrono::microseconds(random() % 50'000));
  };
  Pipeline pipe(worker, test.layers(delay), test.options());
  constexpr int kBatches = 7;
  std::vector<BatchResult> alone;
  for (int batch = 0; batch < kBatches; ++batch) {
    test.train_step(pipe, batch, false);
    alone.push_back(result_of(pipe, [&] { return pipe.finish(); }));
  }
  const auto expect_result = [&](std::optional<int> batch, const BatchResult& result) {
    EXPECT_EQ(std::isnan(result.loss), !batch);
    if (!batch) return;
    const BatchResult& expected = alone[static_cast<std::size_t>(*batch)];
    EXPECT_NEAR(result.loss, expected.loss, 1e-12);
    for (std::size_t i = 0; i < expected.gradients.size(); ++i)
      expect_close(result.gradients[i], expected.gradients[i]);
  };
  std::optional<int> in_flight;
  for (int batch = 0; batch < kBatches; ++batch) {
    SCOPED_TRACE(fmt::format("batch {} on worker {}", batch, worker.rank()));
    delay();
    const auto train = [&] { return test.train_step(pipe, batch, batch == test.step); };
    if (in_flight == test.step) {
      EXPECT_ANY_THROW(train());  // drops this batch, too
      in_flight.reset();
      continue;
    }
    expect_result(in_flight, result_of(pipe, train));
    in_flight = batch;
  }
  expect_result(in_flight, result_of(pipe, [&] { return pipe.finish(); }));
}

TEST(Staleness, ABatchThatFailsLosesNeitherTheBatchBeforeItNorThoseAfterTheNext) {
  const auto cases = torchspan::testing::number_from("TORCHSPAN_CASES", std::uint64_t{12});
  const auto first = torchspan::testing::number_from("TORCHSPAN_SEED", std::uint64_t{1});
  for (std::uint64_t seed = first; seed < first + cases; ++seed) {
    const FailingBatch test{seed};
    SCOPED_TRACE(test.text());
    on_workers(test.stages * test.replicas / test.stages_per_worker, seed,
               [&](Worker& worker) { expect_all_batches_but_one(worker, test); });
    ASSERT_FALSE(HasFailure());
  }
}

TEST(Staleness, AWrongTargetFailsOnAllWorkersWithTheNextCall) {
  on_workers(2, 1, [](Worker& worker) {
    Pipeline pipe(worker, model_of({2}), overlapping({.micro_batches = 2}, {2}));
    const at::Tensor rows = seeded({4, kWidth}, 1);
    pipe.train_step(rows, rows, mean_square);
    EXPECT_FALSE(std::isnan(pipe.train_step(rows, seeded({3, kWidth}, 2), mean_square)));
    EXPECT_THAT(error_text([&] { pipe.finish(); }), HasSubstr("the target has 3 rows"));
    pipe.train_step(rows, rows, mean_square);
    EXPECT_FALSE(std::isnan(pipe.finish()));
  });
}

TEST(Staleness, RefusesWhatItCannotKeepApart) {
  on_workers(2, 1, [](Worker& worker) {
    const auto refusal = [&](const Layers& layers, PipelineOptions options) {
      options.balance = {1, 1};
      return error_text([&] { Pipeline(worker, layers, options); });
    };
    EXPECT_THAT(refusal(model_of({2}), {.staleness = 2}), HasSubstr("staleness is 2"));
    EXPECT_THAT(refusal(model_of({2}), {.schedule = Schedule::kArrival, .staleness = 1}),
                HasSubstr("kArrival"));
    Layers norms;
    norms.add<Dense>(1u);
    norms.add<DeferredBatchNorm>(torch::nn::BatchNormOptions(kWidth));
    EXPECT_THAT(refusal(norms, {.staleness = 1}),
                AllOf(HasSubstr("DeferredBatchNorm"), HasSubstr("layer 1")));
    Pipeline pipe(worker, model_of({2}), overlapping({}, {2}));
    const at::Tensor rows = seeded({4, kWidth}, 1);
    pipe.train_step(rows, rows, mean_square);
    EXPECT_THAT(error_text([&] { pipe.infer(rows); }), HasSubstr("call finish()"));
    EXPECT_THAT(error_text([&] { pipe.forward(rows); }), HasSubstr("call finish()"));
    pipe.finish();
    pipe.infer(rows);
  });
}

/// Two parameters in one block of memory.
struct HalvesImpl : torch::nn::Module {
  HalvesImpl() {
    const at::Tensor block = seeded({2, kWidth}, 9);
    upper = register_parameter("upper", block.narrow(0, 0, 1));
    lower = register_parameter("lower", block.narrow(0, 1, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return x * upper + lower; }
  at::Tensor upper, lower;
};
TORCH_MODULE(Halves);

TEST(Staleness, RefusesParametersThatShareMemory) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add<Halves>();
    EXPECT_THAT(error_text([&] {
                  Pipeline(worker, layers, {.balance = {1, 1}, .staleness = 1});
                }),
                AllOf(HasSubstr("parameter 'upper' of layer 1"), HasSubstr("parameter 'lower' of layer 1"),
                      HasSubstr("worker 'worker1' share memory")));
    Pipeline allowed(worker, layers, {.balance = {1, 1}});
  });
}

TEST(Staleness, RefusesOptionsOfStepsThatDoNotOverlap) {
  on_workers(2, 1, [](Worker& worker) {
    Pipeline pipe(worker, model_of({2}), overlapping({}, {2}));
    const at::Tensor rows = seeded({4, kWidth}, 1);
    StepOptions waits;
    waits.before_first_backward = make_ready_future<void>();
    for (const auto& [options, name] :
         {std::pair{waits, "before_first_backward"}, std::pair{StepOptions{.no_sync = true}, "no_sync"}}) {
      const std::string text = error_text([&, &given = options] {
        pipe.train_step(rows, rows, mean_square, given);
        pipe.finish();
      });
      EXPECT_THAT(text, HasSubstr("StepOptions::" + std::string(name) + " cannot be combined"));
    }
    pipe.train_step(rows, rows, mean_square);
    EXPECT_FALSE(std::isnan(pipe.finish()));
  });
}

TEST(Staleness, ReturnsTheLossAloneWithoutGradients) {
  on_workers(2, 1, [](Worker& worker) {
    const Case shape{2};
    Pipeline pipe(worker, model_of(shape), overlapping({.micro_batches = 2}, shape));
    DelayedTraining expected(shape);
    {
      const torch::NoGradGuard no_grad;
      pipe.train_step(data_of(0, 0, 1), data_of(0, 0, 50), mean_square);
    }
    expected.begin(0);
    EXPECT_NEAR(pipe.finish(), expected.end(0), 1e-12);
    for (const at::Tensor& parameter : pipe.parameters()) EXPECT_FALSE(parameter.grad().defined());
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::staleness_test
