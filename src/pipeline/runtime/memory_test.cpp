#include <algorithm>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::memory_test {
namespace {

/// Number of tensors of a kind that are alive, and its maximum.
struct ActivationCount {
  int alive = 0;
  int most = 0;
  int made = 0;
};

/// Copies `x`; `count` counts the copy until its memory is freed.
at::Tensor counted(const at::Tensor& x, ActivationCount& count) {
  auto* memory = new std::vector<double>(static_cast<std::size_t>(x.numel()));
  ++count.made;
  count.most = std::max(count.most, ++count.alive);
  const at::Tensor copy = at::from_blob(
      memory->data(), x.sizes(),
      [memory, &count](void*) {
        --count.alive;
        delete memory;
      },
      at::kDouble);
  copy.copy_(x.detach());
  return copy;
}

/// A layer whose output is counted and not saved by its graph; reports the start of its backward.
struct CountedOutput : torch::autograd::Function<CountedOutput> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t count, std::int64_t alive_at_backward) {
    context->saved_data["count"] = count;
    context->saved_data["seen"] = alive_at_backward;
    return counted(x, *reinterpret_cast<ActivationCount*>(count));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto* count = reinterpret_cast<const ActivationCount*>(context->saved_data["count"].toInt());
    reinterpret_cast<std::vector<int>*>(context->saved_data["seen"].toInt())->push_back(count->alive);
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

at::Tensor count_output(const at::Tensor& x, ActivationCount& count, std::vector<int>& alive_at_backward) {
  return CountedOutput::apply(x, reinterpret_cast<std::int64_t>(&count),
                              reinterpret_cast<std::int64_t>(&alive_at_backward));
}

PipelineOptions with(Schedule schedule, ActivationCheckpoint checkpoint, int micro_batches = 6) {
  PipelineOptions options;
  options.micro_batches = micro_batches;
  options.schedule = schedule;
  options.checkpoint = checkpoint;
  return options;
}

const at::Tensor& rows() {
  static const at::Tensor tensor = seeded({12, kWidth}, 3);
  return tensor;
}

// peer: pipelining `output_chunks_memory_usage`, test_backward `from_gradient_edge`,
//   `mixed_edge_and_tensor_outputs`: same
// peer: other_pipelines MG `deallocate_output_tensor`: same, without touching a tensor's data
TEST(PipelineMemory, OutputsAreFreedOnceTheyAreSent) {
  for (const ActivationCheckpoint checkpoint :
       {ActivationCheckpoint::kNever, ActivationCheckpoint::kAlways}) {
    ActivationCount count;
    std::vector<int> alive;
    on_workers(2, 1, [&](Worker& worker) {
      Layers layers;
      layers.add<Dense>(1u);
      layers.add_function("counted", [&](const at::Tensor& x) { return count_output(x, count, alive); });
      layers.add<Dense>(2u);
      PipelineOptions options = with(Schedule::kGPipe, checkpoint);
      options.balance = {2, 1};
      Pipeline pipe(worker, layers, options);
      pipe.train_step(rows(), rows(), mean_square);
    });
    // All were sent, and all forwards behind them done, before the first backward.
    EXPECT_EQ(alive, std::vector<int>(6, 0)) << "outputs alive at the beginning of each backward";
    EXPECT_EQ(count.made, checkpoint == ActivationCheckpoint::kNever ? 6 : 12);
    EXPECT_EQ(count.alive, 0);
  }
}

TEST(PipelineMemory, OutputsHandedOnInsideAWorkerAreFreedWithTheirUse) {
  ActivationCount count;
  std::vector<int> alive;
  on_workers(1, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("counted", [&](const at::Tensor& x) { return count_output(x, count, alive); });
    layers.add_function("plus", [](const at::Tensor& x) { return x + 1; });  // saves nothing
    layers.add<Dense>(2u);
    PipelineOptions options = with(Schedule::kGPipe, ActivationCheckpoint::kNever);
    options.balance = {2, 1, 1};
    options.workers = {"worker0", "worker0", "worker0"};
    Pipeline pipe(worker, layers, options);
    pipe.train_step(rows(), rows(), mean_square);
  });
  EXPECT_EQ(alive, std::vector<int>(6, 0));
}

/// A layer whose graph holds one counted tensor.
std::function<at::Tensor(const at::Tensor&)> keeps_one(ActivationCount& count) {
  return [&count](const at::Tensor& x) {
    return torch::GradMode::is_enabled() ? x * counted(at::ones_like(x), count) : x * 1;
  };
}

/// Counts the graphs of each of three stages.
std::vector<ActivationCount> graphs(PipelineOptions options, StepReport* report = nullptr) {
  std::vector<ActivationCount> all(3);
  on_workers(3, 1, [&](Worker& worker) {
    Layers layers;
    for (std::uint64_t stage = 0; stage < 3; ++stage) {
      layers.add<Dense>(stage + 1);
      layers.add_function("keeps", [keep = keeps_one(all[stage])](const at::Tensor& x) { return keep(x); });
    }
    options.balance = {2, 2, 2};
    Pipeline pipe(worker, layers, options);
    for (int step = 0; step < 3; ++step) {
      pipe.train_step(rows(), rows(), mean_square);
      EXPECT_EQ(all[static_cast<std::size_t>(worker.rank())].alive, 0) << "after step " << step;
    }
    if (report != nullptr && worker.rank() == 0) *report = pipe.last_step();
  });
  return all;
}

// peer: pipelining multi_iter
TEST(PipelineMemory, AGraphIsFreedWithItsMicroBatchsBackward) {
  // GPipe holds all m, 1F1B at most as many as there are stages from here on.
  for (const ActivationCount& stage : graphs(with(Schedule::kGPipe, ActivationCheckpoint::kNever)))
    EXPECT_EQ(stage.most, 6);
  const auto stages = graphs(with(Schedule::k1F1B, ActivationCheckpoint::kNever));
  for (int stage = 0; stage < 3; ++stage) EXPECT_EQ(stages[static_cast<std::size_t>(stage)].most, 3 - stage);
}

/// A first stage runs its backward whole, in place of the weight gradient.
std::vector<schedule::Costs> freed_with_input_gradients(int stages) {
  std::vector<schedule::Costs> costs(static_cast<std::size_t>(stages), {.weight_input = 0});
  costs[0].weight_input = 1;
  return costs;
}

// peer: pipelining multi_iter
TEST(PipelineMemory, WhatOnlyInputGradientsNeedIsFreedBeforeTheWeightGradients) {
  for (const Schedule schedule : {Schedule::kZBH1, Schedule::kZBH2, Schedule::kZB1P}) {
    for (const int micro_batches : {1, 2, 6, 12}) {
      SCOPED_TRACE(::testing::Message()
                   << "schedule " << static_cast<int>(schedule) << ", " << micro_batches);
      StepReport report;
      const auto stages = graphs(with(schedule, ActivationCheckpoint::kNever, micro_batches), &report);
      const auto simulated = schedule::simulate(report.table, freed_with_input_gradients(3));
      for (std::size_t stage = 0; stage < 3; ++stage)
        EXPECT_EQ(stages[stage].most, simulated.peak_live[stage]) << "stage " << stage;
    }
  }
}

TEST(PipelineMemory, UnderCheckpointingOneGraphIsAliveAtATime) {
  for (const Schedule schedule : {Schedule::kArrival, Schedule::kGPipe, Schedule::k1F1B}) {
    for (const ActivationCount& stage : graphs(with(schedule, ActivationCheckpoint::kAlways))) {
      EXPECT_EQ(stage.most, 1);
      EXPECT_EQ(stage.made, 3 * 6) << "each forward was repeated once";
    }
  }
}

TEST(PipelineMemory, ArrivalHoldsNoMoreThanItsLimit) {
  PipelineOptions options = with(Schedule::kArrival, ActivationCheckpoint::kNever, 12);
  options.max_in_flight = 2;
  for (const ActivationCount& stage : graphs(options)) EXPECT_LE(stage.most, 2);
}

// peer: pipe no_grad
TEST(PipelineMemory, InferenceKeepsNothing) {
  ActivationCount count;
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("keeps", [&](const at::Tensor& x) { return x * counted(at::ones_like(x), count); });
    layers.add<Dense>(2u);
    Pipeline pipe(worker, layers, with(Schedule::k1F1B, ActivationCheckpoint::kNever));
    pipe.infer(rows());
  });
  EXPECT_EQ(count.made, 6);
  EXPECT_EQ(count.most, 1);
}

TEST(PipelineMemory, AStepThatIsGivenUpFreesItsGraphs) {
  ActivationCount count;
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("keeps", [keep = keeps_one(count)](const at::Tensor& x) { return keep(x); });
    layers.add<Dense>(2u);
    PipelineOptions options = with(Schedule::k1F1B, ActivationCheckpoint::kNever);
    options.balance = {2, 1};
    Pipeline pipe(worker, layers, options);
    pipe.forward(rows());
    if (worker.rank() == 0) {
      EXPECT_EQ(count.alive, 6);
    }
    pipe.train_step(rows(), rows(), mean_square);
    if (worker.rank() == 0) {
      EXPECT_EQ(count.alive, 0);
    }
  });
}

// peer: pipelining activation_liveness_*: same in kind: the real step is compared with its simulation
TEST(PipelineMemory, PeaksAreThoseOfTheSchedulesSimulation) {
  for (const Schedule schedule : {Schedule::kGPipe, Schedule::k1F1B, Schedule::kZBH1, Schedule::kZBH2}) {
    for (const int micro_batches : {1, 2, 6, 12}) {
      StepReport report;
      graphs(with(schedule, ActivationCheckpoint::kNever, micro_batches), &report);
      const auto simulated = schedule::simulate(report.table, {schedule::Costs{}});
      EXPECT_EQ(report.measured.peak_live, simulated.peak_live);
      EXPECT_EQ(report.measured.weight_inputs, simulated.weight_inputs);
      EXPECT_EQ(report.measured.peak_weight_inputs, simulated.peak_weight_inputs);
      if (schedule == Schedule::kZBH1 || schedule == Schedule::kZBH2) continue;
      for (int worker = 0; worker < 3; ++worker) {
        const int expected =
            schedule == Schedule::kGPipe ? micro_batches : std::min(micro_batches, 3 - worker);
        EXPECT_EQ(report.measured.peak_live[static_cast<std::size_t>(worker)], expected)
            << "worker " << worker << " of " << micro_batches;
      }
    }
  }
}

}  // namespace
}  // namespace torchspan::pipeline::testing::memory_test
