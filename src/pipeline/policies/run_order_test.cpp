// peer: other_pipelines MG `forward_backward_func` with, without and with uneven interleaving: same; uneven
//   rounds run as 1F1B
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <random>

#include <torch/torch.h>

#include <torchspan/pipeline.h>

#include "tests/support/pipeline_world.h"

namespace torchspan::pipeline::run_order_test {
namespace {

using schedule::Action;
using schedule::ActionKind;
using torchspan::testing::on_workers;

constexpr Duration kForwardTime = std::chrono::milliseconds(1);
constexpr Duration kBackwardTime = std::chrono::milliseconds(2);
constexpr Duration kWeightTime = std::chrono::milliseconds(3);

/// A layer whose forward and backward take time on the simulated clock.
struct Slow : torch::autograd::Function<Slow> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t executor) {
    context->saved_data["executor"] = executor;
    reinterpret_cast<Executor*>(executor)->sleep(kForwardTime);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<Executor*>(context->saved_data["executor"].toInt())->sleep(kBackwardTime);
    return {gradients[0], at::Tensor()};
  }
};

/// A weight whose gradient takes time.
struct SlowWeight : torch::autograd::Function<SlowWeight> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& weight,
                            std::int64_t executor) {
    context->saved_data["executor"] = executor;
    return weight.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<Executor*>(context->saved_data["executor"].toInt())->sleep(kWeightTime);
    return {gradients[0], at::Tensor()};
  }
};

struct SlowLayerImpl : torch::nn::Module {
  explicit SlowLayerImpl(Executor* given) : executor(given) {
    weight = register_parameter("weight", at::zeros({1, 2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto address = reinterpret_cast<std::int64_t>(executor);
    return Slow::apply(x + SlowWeight::apply(weight, address), address);
  }
  Executor* executor;
  at::Tensor weight;
};
TORCH_MODULE(SlowLayer);

/// A model whose layer ranges are one slow use each, on the stages of `stages` in turn.
Layers slow_layers(Executor& executor, const std::vector<int>& stages) {
  const auto slow = [&executor](const at::Tensor& x) {
    const at::Tensor y =
        x.requires_grad() || !torch::GradMode::is_enabled() ? x : x.detach().requires_grad_(true);
    return Slow::apply(y, reinterpret_cast<std::int64_t>(&executor));
  };
  Layers layers;
  std::map<int, Use<void>> uses;
  for (const int stage : stages) {
    if (uses.contains(stage)) {
      layers.reuse(uses.at(stage));
    } else {
      uses.emplace(stage, layers.add_function(fmt::format("slow{}", stage), slow));
    }
  }
  return layers;
}

struct SlowRun {
  std::vector<int> stages;  ///< in the order of the model; first met in rising order
  std::vector<std::string> workers;
  int world = 1;
  PipelineOptions options;
};

/// One training step on the simulated clock. `with_weights`: of layers with parameters.
StepReport train(const SlowRun& run, bool with_weights = false) {
  StepReport report;
  torchspan::testing::ClusterOptions cluster = torchspan::testing::pipeline_cluster(run.world);
  cluster.network.latency = Duration::zero();
  torchspan::testing::SimCluster world(cluster);
  world.run([&](Worker& worker) {
    PipelineOptions options = run.options;
    options.balance.assign(
        static_cast<std::size_t>(*std::max_element(run.stages.begin(), run.stages.end())) + 1, 1);
    options.workers = run.workers;
    Executor& executor = worker.runtime().executor;
    Layers weighted;
    for (std::size_t stage = 0; stage < run.stages.size(); ++stage) weighted.add<SlowLayer>(&executor);
    Pipeline pipe(worker, with_weights ? weighted : slow_layers(executor, run.stages), options);
    const at::Tensor x = at::ones({options.micro_batches, 2});
    pipe.train_step(x, x, [](const at::Tensor& output, const at::Tensor&) { return output.mean(); });
    if (worker.rank() == 0) report = pipe.last_step();
  });
  return report;
}

schedule::Costs slow_costs() {
  return {.forward = kForwardTime, .input_gradient = kBackwardTime, .weight_gradient = Duration::zero()};
}

/// The first stage runs its whole backward as weight gradient, unless the schedule runs it whole.
std::vector<schedule::Costs> slow_costs_of_weights(std::size_t stages) {
  schedule::Costs costs{
      .forward = kForwardTime, .input_gradient = kBackwardTime, .weight_gradient = kWeightTime};
  std::vector<schedule::Costs> all(stages, costs);
  all[0].input_gradient = Duration::zero();
  all[0].weight_gradient = kBackwardTime + kWeightTime;
  return all;
}

void expect_as_planned(const StepReport& report, const std::vector<schedule::Costs>& costs = {slow_costs()}) {
  ASSERT_FALSE(report.table.actions.empty());
  const schedule::Timeline plan = schedule::simulate(report.table, costs);
  ASSERT_EQ(report.measured.spans.size(), plan.spans.size());
  for (std::size_t worker = 0; worker < plan.spans.size(); ++worker) {
    ASSERT_EQ(report.measured.spans[worker].size(), report.table.actions[worker].size());
    for (std::size_t i = 0; i < plan.spans[worker].size(); ++i) {
      EXPECT_EQ(report.measured.spans[worker][i].action, report.table.actions[worker][i])
          << "worker " << worker << ", action " << i;
      EXPECT_EQ(report.measured.spans[worker][i].start, plan.spans[worker][i].start)
          << "worker " << worker << ", " << schedule::to_string(plan.spans[worker][i].action);
    }
    EXPECT_EQ(report.measured.peak_live[worker], plan.peak_live[worker]) << "worker " << worker;
  }
  EXPECT_EQ(report.measured.makespan, plan.makespan);
}

std::vector<std::string> names(const std::vector<int>& ranks) {
  std::vector<std::string> all;
  for (const int rank : ranks) all.push_back(torchspan::testing::SimCluster::name(rank));
  return all;
}

SlowRun chain(int workers, int chunks, int micro_batches, Schedule schedule) {
  SlowRun run;
  for (int stage = 0; stage < workers * chunks; ++stage) {
    run.stages.push_back(stage);
    run.workers.push_back(torchspan::testing::SimCluster::name(stage % workers));
  }
  run.world = workers;
  run.options.micro_batches = micro_batches;
  run.options.schedule = schedule;
  run.options.checkpoint = ActivationCheckpoint::kNever;
  return run;
}

TEST(RunOrder, IsTheSchedulesAndSoAreTimesAndPeaks) {
  for (const int workers : {1, 2, 4}) {
    for (const int micro_batches : {1, 3, 4, 8}) {
      for (const Schedule schedule : {Schedule::kGPipe, Schedule::k1F1B}) {
        SCOPED_TRACE(fmt::format("{} workers, {} micro-batches, schedule {}", workers, micro_batches,
                                 static_cast<int>(schedule)));
        expect_as_planned(train(chain(workers, 1, micro_batches, schedule)));
      }
    }
  }
}

// peer: pipelining grad_with_manual_interleaved
TEST(RunOrder, InterleavedIsTheSchedules) {
  for (const int workers : {2, 4}) {
    for (const int chunks : {2, 3}) {
      SCOPED_TRACE(fmt::format("{} workers, {} chunks", workers, chunks));
      const StepReport report = train(chain(workers, chunks, 2 * workers, Schedule::kInterleaved));
      EXPECT_EQ(report.table.name, schedule::interleaved({workers, 2 * workers, chunks}).name);
      expect_as_planned(report);
    }
  }
}

// peer: pipelining `v_shape_schedules`, `grad_with_v_schedule`, `grad_with_split_b_w`,
//   `pipeline_schedule_runtime_custom_sched`: better: order and times are those of the simulation
TEST(RunOrder, OfSplitBackwardsIsTheSchedules) {
  struct Case {
    Schedule schedule;
    int chunks;
    bool v_shaped;
  };
  for (const Case& tried :
       {Case{Schedule::kZBH1, 1, false}, Case{Schedule::kZBH2, 1, false}, Case{Schedule::kZB1P, 2, false},
        Case{Schedule::kZBV, 2, true}, Case{Schedule::kDualPipeV, 2, true}}) {
    for (const int workers : {1, 2, 4}) {
      for (const int micro_batches : {2, 8}) {
        SCOPED_TRACE(fmt::format("schedule {}, {} workers, {} micro-batches",
                                 static_cast<int>(tried.schedule), workers, micro_batches));
        SlowRun run = chain(workers, tried.chunks, micro_batches, tried.schedule);
        if (tried.v_shaped) run.workers = {};  // the default
        const StepReport report = train(run, true);
        expect_as_planned(report, slow_costs_of_weights(run.stages.size()));
      }
    }
  }
}

TEST(RunOrder, IsTheSchedulesWhereLayersAreUsedAgain) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 12; ++round) {
    SlowRun run;
    run.world = 2 + static_cast<int>(random() % 2);
    int known = 0;
    for (int order = 0; order < 6; ++order) {
      const int stage = static_cast<int>(random() % static_cast<std::uint64_t>(known + 1));
      // A layer range is one use: the same stage does not follow itself.
      if (!run.stages.empty() && stage == run.stages.back()) continue;
      run.stages.push_back(stage);
      known = std::max(known, stage + 1);
    }
    run.world = std::min(run.world, known);
    std::vector<int> ranks;
    for (int stage = 0; stage < known; ++stage) ranks.push_back(stage % run.world);
    run.workers = names(ranks);
    run.options.micro_batches = 4;
    run.options.schedule = round % 2 == 0 ? Schedule::k1F1B : Schedule::kGPipe;
    run.options.checkpoint = ActivationCheckpoint::kNever;
    SCOPED_TRACE(fmt::format("round {}", round));
    expect_as_planned(train(run));
  }
}

TEST(RunOrder, OfArrivalIsBoundedByItsCredit) {
  for (const int limit : {1, 2, 3, 8}) {
    SlowRun run = chain(3, 1, 8, Schedule::kArrival);
    run.options.max_in_flight = limit;
    const StepReport report = train(run);
    EXPECT_TRUE(report.table.actions.empty());
    EXPECT_EQ(report.measured.peak_live[0], limit);
    for (const auto& spans : report.measured.spans) EXPECT_EQ(spans.size(), 16u);
  }
}

TEST(RunOrder, ARecomputeIsDoneWhileTheGradientIsOnItsWay) {
  SlowRun run = chain(2, 1, 2, Schedule::k1F1B);
  run.options.checkpoint = ActivationCheckpoint::kAlways;
  const StepReport report = train(run);
  // From 3 ms on the first worker waits for the gradient of micro-batch 0, which the second worker computes.
  // It recomputes the forward meanwhile, so that the backward takes only its own time.
  const auto& first = report.measured.spans[0];
  const auto backward = std::find_if(first.begin(), first.end(), [](const schedule::ActionSpan& span) {
    return span.action == Action{ActionKind::kBackward, 0, 0};
  });
  ASSERT_NE(backward, first.end());
  EXPECT_EQ(backward->end - backward->start, kBackwardTime);
}

TEST(RunOrder, TheFirstBackwardWaitsForItsController) {
  on_workers(2, 1, [](Worker& worker) {
    Executor& executor = worker.runtime().executor;
    PipelineOptions options{
        .balance = {1, 1}, .micro_batches = 2, .checkpoint = ActivationCheckpoint::kNever};
    Pipeline pipe(worker, slow_layers(executor, {0, 1}), options);
    Promise<void> go(worker.backend()->continuations());
    const TimePoint begin = executor.now();
    Thread controller = executor.spawn("controller", [&] {
      executor.sleep(std::chrono::milliseconds(50));
      go.set_value();
    });
    const at::Tensor x = at::ones({2, 2});
    pipe.train_step(x, x, [](const at::Tensor& output, const at::Tensor&) { return output.mean(); },
                    {.before_first_backward = go.future()});
    EXPECT_GE(executor.now() - begin, std::chrono::milliseconds(52));
    controller.join();
  });
}

}  // namespace
}  // namespace torchspan::pipeline::run_order_test
