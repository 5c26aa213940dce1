// Layers that run collective operations, in stages of pipelines and in segments that are computed again, on simulated workers
// whose layers take random times; and what one process computes.
#include <algorithm>
#include <fmt/format.h>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include <torch/torch.h>

#include <torchspan/data_parallel.h>
#include <torchspan/data_parallel/sync_batch_norm.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/pipeline.h>
#include <torchspan/sharded.h>
#include <torchspan/sharded/functional.h>
#include <torchspan/sharded/tensor_parallel.h>

#include "sharded/units/test_models.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/in_process_group.h"
#include "tests/support/pipeline_world.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::communicating_layers_test {
namespace {

using collective::Group;
using pipeline::ActivationCheckpoint;
using pipeline::Layers;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Schedule;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::recomputed;
using torchspan::testing::error_text;
using torchspan::testing::InProcessOptions;
using torchspan::testing::InProcessWorld;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;
using torchspan::testing::SimCluster;

constexpr std::int64_t kWidth = 4;
constexpr std::int64_t kRows = 16;
constexpr int kMicroBatches = 8;
constexpr int kSteps = 2;
constexpr int kLayersPerStage = 3;
constexpr InProcessOptions kLimit{.timeout = std::chrono::seconds(30)};  // on the simulated clock

at::Tensor values(at::IntArrayRef sizes, double seed) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::arange(count, at::kDouble).mul(0.71).add(seed).sin().reshape(sizes).mul(0.5);
}

torch::nn::Linear linear(double seed) {
  torch::nn::Linear layer(kWidth, kWidth);
  layer->to(at::kDouble);
  const at::NoGradGuard no_grad;
  layer->weight.copy_(values({kWidth, kWidth}, seed));
  layer->bias.copy_(values({kWidth}, seed + 1));
  return layer;
}

/// The time that one worker's layers take on the simulated clock: other times on each worker.
struct Pace {
  Pace(Executor& on, std::uint64_t seed) : executor(on), random(seed) {}
  void take() { executor.sleep(std::chrono::microseconds(random() % 3000)); }
  Executor& executor;
  std::mt19937_64 random;
};

/// Takes time in the forward and in the backward.
struct Paced : torch::autograd::Function<Paced> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t pace) {
    context->saved_data["pace"] = pace;
    reinterpret_cast<Pace*>(pace)->take();
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<Pace*>(context->saved_data["pace"].toInt())->take();
    return {gradients[0], at::Tensor()};
  }
};

struct WholeBlockImpl : torch::nn::Module {
  explicit WholeBlockImpl(double seed)
      : up(register_module("up", linear(seed))), down(register_module("down", linear(seed + 3))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::tanh(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(WholeBlock);

struct ParallelBlockImpl : torch::nn::Module {
  ParallelBlockImpl(double seed, const Group& group, Pace* given)
      : pace(given),
        up(register_module("up", ColumnParallelLinear(linear(seed), group))),
        down(register_module("down", RowParallelLinear(linear(seed + 3), group))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + down(at::tanh(up(Paced::apply(x, reinterpret_cast<std::int64_t>(pace)))));
  }
  Pace* pace;
  ColumnParallelLinear up;
  RowParallelLinear down;
};
TORCH_MODULE(ParallelBlock);

/// A layer without parameters in which a user calls a group; both pipelines have the same values.
at::Tensor scale(const at::Tensor& x, const at::Tensor& largest) { return x / (largest + 1); }
auto scale_by_largest(const Group& group) {
  return [group](const at::Tensor& x) {
    const at::Tensor largest = x.detach().abs().amax().reshape({1});
    return scale(x, group.all_reduce(largest, collective::kMax).wait());
  };
}
/// The same with an operation that has gradients.
auto average(const Group& group) {
  return [group](const at::Tensor& x) { return functional::all_reduce(x, group) / group.size(); };
}

at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

at::Tensor input_of(int step) { return values({kRows, kWidth}, step); }
at::Tensor target_of(int step) { return values({kRows, kWidth}, step + 50); }

/// A schedule, and the workers of its stages.
struct Case {
  const char* name;
  Schedule schedule;
  std::vector<int> stages;
  ActivationCheckpoint checkpoint = ActivationCheckpoint::kExceptLast;
  std::vector<int> checkpoint_layers = {};
  std::function<schedule::Table(const schedule::Placement&)> custom = {};
};

const std::vector<int> kOneEach{0, 1}, kThree{0, 1, 2}, kLooped{0, 1, 0, 1}, kInV{0, 1, 1, 0};

schedule::Table breadth_first(const schedule::Placement& placement) {
  return schedule::looped_breadth_first({placement.ranks, placement.micro_batches, 2});
}
schedule::Table searched(const schedule::Placement& placement) {
  return schedule::zero_bubble(placement, {schedule::Costs{}});
}

std::vector<Case> cases() {
  const auto always = ActivationCheckpoint::kAlways;
  return {{"GPipe", Schedule::kGPipe, kOneEach},
          {"GPipe, looped", Schedule::kGPipe, kLooped},
          {"1F1B", Schedule::k1F1B, kOneEach},
          {"1F1B on three workers", Schedule::k1F1B, kThree},
          {"1F1B, looped", Schedule::k1F1B, kLooped},
          {"1F1B, always", Schedule::k1F1B, kInV, always},
          {"interleaved", Schedule::kInterleaved, kLooped},
          {"interleaved, always", Schedule::kInterleaved, kLooped, always},
          {"interleaved, some layers", Schedule::kInterleaved, kLooped, always, {0, 3}},
          {"breadth-first", Schedule::kCustom, kLooped, ActivationCheckpoint::kExceptLast, {}, breadth_first},
          {"ZB-H1", Schedule::kZBH1, kOneEach},
          {"ZB-H1 on three workers", Schedule::kZBH1, kThree},
          {"ZB-H2", Schedule::kZBH2, kOneEach},
          {"ZB1P", Schedule::kZB1P, kLooped},
          {"ZB1P, always", Schedule::kZB1P, kLooped, always},
          {"ZBV", Schedule::kZBV, kInV},
          {"DualPipeV", Schedule::kDualPipeV, kInV},
          {"searched", Schedule::kCustom, kInV, always, {}, searched}};
}

PipelineOptions options_of(const Case& one, int pipeline) {
  PipelineOptions options;
  for (const int worker : one.stages) {
    options.balance.push_back(kLayersPerStage);
    options.workers.push_back(SimCluster::name(2 * worker + pipeline));
  }
  options.micro_batches = kMicroBatches;
  options.schedule = one.schedule;
  options.custom_schedule = one.custom;
  options.checkpoint = one.checkpoint;
  options.checkpoint_layers = one.checkpoint_layers;
  options.name = fmt::format("pipeline {}", pipeline);
  return options;
}

/// A worker of one of two pipelines. Its group has the workers of the same stages in both.
struct Place {
  Worker& worker;
  Group group;
  int pipeline;  ///< of this worker
  Pace pace;
};
/// Runs `body` on the workers of both, each pipeline with `workers`: even ranks are those of pipeline 0.
void on_two_pipelines(int workers, std::uint64_t seed, const std::function<void(Place&)>& body) {
  std::unique_ptr<InProcessWorld> groups;
  SimCluster cluster(torchspan::testing::pipeline_cluster(2 * workers, seed));
  cluster.run([&](Worker& worker) {
    const int rank = static_cast<int>(worker.rank());
    if (rank == 0) groups = std::make_unique<InProcessWorld>(cluster.executor(), 2 * workers, kLimit);
    worker.barrier();
    {
      Place place{worker, groups->group(rank, worker.runtime()).split(rank / 2, rank), rank % 2,
                  Pace(cluster.executor(), 100 * seed + worker.rank())};
      try {
        body(place);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "worker " << rank << ": " << error.what();
        groups->kill(rank);
      }
    }
    worker.barrier();
    if (rank == 0) groups.reset();
  });
}

/// What one process computes in each step, one micro-batch after the other: the loss and the gradients.
struct Expected {
  explicit Expected(std::size_t stages) {
    for (std::size_t stage = 0; stage < stages; ++stage)
      blocks.emplace_back(10.0 * static_cast<double>(stage));
  }
  at::Tensor forward(at::Tensor x) {
    for (WholeBlock& block : blocks) {
      x = block(x);
      x = scale(x, x.detach().abs().amax());
    }
    return x;
  }
  double run(int step) {
    for (WholeBlock& block : blocks) block->zero_grad();
    const std::vector<at::Tensor> inputs = input_of(step).chunk(kMicroBatches);
    const std::vector<at::Tensor> targets = target_of(step).chunk(kMicroBatches);
    double sum = 0;
    for (std::size_t i = 0; i < kMicroBatches; ++i) {
      const at::Tensor loss = mean_square(forward(inputs[i]), targets[i]) / kMicroBatches;
      loss.backward();
      sum += loss.item<double>();
    }
    return sum;
  }
  std::vector<WholeBlock> blocks;
};

/// This rank's part of a tensor of the whole module.
at::Tensor part_of(const TensorParallelModule& module, const std::string& name, const at::Tensor& whole) {
  for (const ParameterPart& part : module.parts()) {
    if (part.name == name) return whole.chunk(module.group().size(), part.dim)[module.group().rank()];
  }
  return whole;
}

void expect_gradients(const TensorParallelModule& ours, const torch::nn::Module& whole) {
  const auto wanted = whole.named_parameters();
  for (const auto& item : ours.named_parameters()) {
    const at::Tensor expected = part_of(ours, item.key(), wanted[item.key()].grad());
    EXPECT_TRUE(at::allclose(item.value().grad(), expected, 1e-12, 1e-12)) << item.key();
  }
}

void expect_gradients(const Pipeline& pipe, const Expected& expected) {
  for (std::size_t stage = 0; stage < expected.blocks.size(); ++stage) {
    const auto module =
        std::dynamic_pointer_cast<ParallelBlockImpl>(pipe.module(kLayersPerStage * static_cast<int>(stage)));
    if (!module) continue;
    SCOPED_TRACE(::testing::Message() << "stage " << stage);
    expect_gradients(*module->up, *expected.blocks[stage]->up);
    expect_gradients(*module->down, *expected.blocks[stage]->down);
  }
}

void clear_gradients(const Pipeline& pipe) {
  for (const at::Tensor& parameter : pipe.parameters()) parameter.mutable_grad().reset();
}

Layers layers_of(Place& place, const Case& one) {
  Layers layers;
  for (std::size_t stage = 0; stage < one.stages.size(); ++stage) {
    layers.add<ParallelBlock>(10.0 * static_cast<double>(stage), place.group, &place.pace);
    layers.add_function("scale", scale_by_largest(place.group));
    layers.add_function("average", average(place.group));
  }
  return layers;
}

void train(Place& place, const Case& one) {
  Expected expected(one.stages.size());
  Pipeline pipe(place.worker, layers_of(place, one), options_of(one, place.pipeline));
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(::testing::Message() << "step " << step);
    clear_gradients(pipe);
    const double wanted = expected.run(step);
    EXPECT_NEAR(pipe.train_step(input_of(step), target_of(step), mean_square), wanted, 1e-12);
    expect_gradients(pipe, expected);
  }
}

/// Runs `body` on two pipelines with the workers of a case, for each seed.
void with_seeds(const Case& one, const std::function<void(Place&)>& body) {
  const int workers = 1 + *std::max_element(one.stages.begin(), one.stages.end());
  const auto seeds = torchspan::testing::number_from("TORCHSPAN_CASES", std::uint64_t{1});
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    on_two_pipelines(workers, seed, [&](Place& place) {
      SCOPED_TRACE(::testing::Message() << one.name << ", seed " << seed);
      body(place);
    });
  }
}

TEST(LayersThatCommunicate, ComputeAsInOneProcessUnderEverySchedule) {
  for (const Case& one : cases()) {
    with_seeds(one, [&](Place& place) { train(place, one); });
  }
}

TEST(LayersThatCommunicate, ComputeAsInOneProcessInStepsOfEveryKind) {
  const Case one{"interleaved", Schedule::kInterleaved, kLooped};
  with_seeds(one, [&](Place& place) {
    Expected expected(one.stages.size());
    Pipeline pipe(place.worker, layers_of(place, one), options_of(one, place.pipeline));
    const double loss = expected.run(0);
    const std::vector<at::Tensor> parts = input_of(0).chunk(kMicroBatches);
    std::vector<at::Tensor> outputs;
    for (const at::Tensor& part : parts) outputs.push_back(expected.forward(part).detach());
    const auto expect_output = [&](const pipeline::Batch& output) {
      if (output.members.empty()) return;
      EXPECT_TRUE(at::allclose(output.members[0].toTensor(), at::cat(outputs), 1e-12, 1e-12));
    };
    {
      const at::NoGradGuard no_grad;
      EXPECT_NEAR(pipe.train_step(input_of(0), target_of(0), mean_square), loss, 1e-12);
    }
    expect_output(pipe.infer(input_of(0)));
    const pipeline::Batch output = pipe.forward(input_of(0));
    expect_output(output);
    if (!output.members.empty()) mean_square(output.members[0].toTensor(), target_of(0)).backward();
    pipe.backward();
    expect_gradients(pipe, expected);
  });
}

/// The first block is used again after the second one.
TEST(LayersThatCommunicate, MayBeUsedAgain) {
  const Case one{"1F1B", Schedule::k1F1B, kOneEach};
  with_seeds(one, [&](Place& place) {
    WholeBlock first(0), second(10);
    Layers layers;
    const auto used = layers.add<ParallelBlock>(0.0, place.group, &place.pace);
    layers.add<ParallelBlock>(10.0, place.group, &place.pace);
    layers.reuse(used);
    PipelineOptions options = options_of(one, place.pipeline);
    options.balance = {1, 1};
    Pipeline pipe(place.worker, layers, options);
    const at::Tensor loss = mean_square(first(second(first(input_of(0)))), target_of(0));
    loss.backward();
    EXPECT_NEAR(pipe.train_step(input_of(0), target_of(0), mean_square), loss.item<double>(), 1e-12);
    for (const auto& [layer, whole] : {std::pair(0, first), std::pair(1, second)}) {
      const auto module = std::dynamic_pointer_cast<ParallelBlockImpl>(pipe.module(layer));
      if (module) expect_gradients(*module->up, *whole->up);
    }
  });
}

/// A batch norm over the micro-batches of two replicas, between layers that take time.
struct NormedImpl : torch::nn::Module {
  explicit NormedImpl(double seed, const std::optional<Group>& group = std::nullopt, Pace* given = nullptr)
      : pace(given),
        dense(register_module("dense", linear(seed))),
        norm(register_module("norm", SyncBatchNorm(torch::nn::BatchNormOptions(kWidth)))) {
    norm->to(at::kDouble);
    if (group) norm->set_group(*group);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor input = pace ? Paced::apply(x, reinterpret_cast<std::int64_t>(pace)) : x;
    return at::tanh(norm(dense(input)));
  }
  Pace* pace;
  torch::nn::Linear dense;
  SyncBatchNorm norm;
};
TORCH_MODULE(Normed);

TEST(LayersThatCommunicate, NormalizeTheMicroBatchesOfAllReplicasTogether) {
  const auto always = ActivationCheckpoint::kAlways;
  for (const Case& one : {Case{"1F1B", Schedule::k1F1B, kThree},
                          {"interleaved", Schedule::kInterleaved, kLooped, always},
                          {"ZBV", Schedule::kZBV, kInV}}) {
    with_seeds(one, [&](Place& place) {
      std::vector<Normed> whole;
      Layers layers;
      for (std::size_t stage = 0; stage < one.stages.size(); ++stage) {
        const double seed = 10 * static_cast<double>(stage);
        layers.add<Normed>(seed, place.group, &place.pace);
        whole.emplace_back(seed);
      }
      PipelineOptions options = options_of(one, 0);
      options.balance.assign(one.stages.size(), 1);
      for (const std::string& worker : options_of(one, 1).workers) options.workers.push_back(worker);
      options.replicas = 2;
      Pipeline pipe(place.worker, layers, options);
      const auto replica = static_cast<std::size_t>(pipe.replica());
      const std::vector<at::Tensor> inputs = input_of(0).chunk(2), targets = target_of(0).chunk(2);
      double wanted = 0;
      for (std::size_t i = 0; i < kMicroBatches; ++i) {
        const auto part = [&](const std::vector<at::Tensor>& halves) {
          return at::cat({halves[0].chunk(kMicroBatches)[i], halves[1].chunk(kMicroBatches)[i]});
        };
        at::Tensor x = part(inputs);
        for (Normed& layer : whole) x = layer(x);
        const at::Tensor loss = mean_square(x, part(targets)) / kMicroBatches;
        loss.backward();
        wanted += loss.item<double>();
      }
      EXPECT_NEAR(pipe.train_step(inputs[replica], targets[replica], mean_square), wanted, 1e-12);
      for (std::size_t layer = 0; layer < whole.size(); ++layer) {
        const auto module = pipe.module(static_cast<int>(layer));
        if (!module) continue;
        const auto parameters = whole[layer]->named_parameters(), buffers = whole[layer]->named_buffers();
        for (const auto& item : module->named_parameters())
          EXPECT_TRUE(at::allclose(item.value().grad(), parameters[item.key()].grad(), 1e-10, 1e-12))
              << item.key() << " of layer " << layer;
        for (const auto& item : module->named_buffers())
          EXPECT_TRUE(at::allclose(item.value(), buffers[item.key()], 1e-10, 1e-12))
              << item.key() << " of layer " << layer;
      }
    });
  }
}

/// What a training step of a case throws on this worker.
std::string error_of_step(Place& place, const Case& one,
                          const std::function<void(PipelineOptions&)>& change = nullptr) {
  PipelineOptions options = options_of(one, place.pipeline);
  if (change) change(options);
  Pipeline pipe(place.worker, layers_of(place, one), options);
  return error_text([&] {
    for (int step = 0; step < 3; ++step) pipe.train_step(input_of(step), target_of(step), mean_square);
  });
}

TEST(LayersThatCommunicate, AreRefusedWhereTheOrderDependsOnTheArrivalOfMessages) {
  with_seeds({"arrival", Schedule::kArrival, kOneEach}, [&](Place& place) {
    EXPECT_THAT(error_of_step(place, {"arrival", Schedule::kArrival, kOneEach}),
                AllOf(HasSubstr("in the forward of micro-batch 0"), HasSubstr("use another schedule")));
  });
  const Case overlapped{"1F1B", Schedule::k1F1B, kOneEach};
  with_seeds(overlapped, [&](Place& place) {
    EXPECT_THAT(error_of_step(place, overlapped, [](PipelineOptions& options) { options.staleness = 1; }),
                AllOf(HasSubstr("in the forward of micro-batch 0"), HasSubstr("use staleness 0")));
    // Steps that do not overlap, and groups of one rank, have no such order.
    PipelineOptions options = options_of(overlapped, place.pipeline);
    options.staleness = 1;
    options.name += " again";
    const Group alone = place.group.split(place.group.rank(), 0);
    Place own{place.worker, alone, place.pipeline, place.pace};
    Pipeline pipe(place.worker, layers_of(own, overlapped), options);
    pipe.train_step(input_of(0), target_of(0), mean_square);
    EXPECT_NEAR(pipe.finish(), Expected(2).run(0), 1e-12);
  });
}

TEST(LayersThatCommunicate, AreRefusedThereAlsoIfOnlyTheirBackwardCommunicates) {
  const Case one{"arrival", Schedule::kArrival, kOneEach};
  with_seeds(one, [&](Place& place) {
    Layers layers;
    for (int stage = 0; stage < 2; ++stage) {
      layers.add<WholeBlock>(10.0 * stage);
      layers.add_function("with a hook", [group = place.group](const at::Tensor& x) {
        at::Tensor y = x * 1;
        if (y.requires_grad())
          y.register_hook(
              [group](const at::Tensor& gradient) { return group.all_reduce(gradient.clone()).wait(); });
        return y;
      });
    }
    PipelineOptions options = options_of(one, place.pipeline);
    options.balance = {2, 2};
    Pipeline pipe(place.worker, layers, options);
    EXPECT_THAT(error_text([&] { pipe.train_step(input_of(0), target_of(0), mean_square); }),
                AllOf(HasSubstr("in the backward of micro-batch"), HasSubstr("use another schedule")));
  });
}

/// Pipelines that do not run the same step must not be paired.
TEST(LayersThatCommunicate, AreNotPairedWithThoseOfAnotherOrder) {
  const Case one{"interleaved", Schedule::kInterleaved, kLooped};
  const std::vector<std::function<void(PipelineOptions&)>> changes{
      [](PipelineOptions& options) { options.schedule = Schedule::kGPipe; },
      [](PipelineOptions& options) { options.checkpoint = ActivationCheckpoint::kNever; },
      [](PipelineOptions& options) { options.micro_batches = kMicroBatches / 2; }};
  for (const auto& change : changes) {
    with_seeds(one, [&](Place& place) {
      const std::string error = error_of_step(place, one, [&](PipelineOptions& options) {
        if (place.pipeline == 1) change(options);
      });
      // Each may also wait for the other one, in different parts.
      EXPECT_THAT(error, AllOf(AnyOf(HasSubstr("called all_reduce"), HasSubstr("did not reach")),
                               HasSubstr("of micro-batch")));
    });
  }
}

/// Pipeline 1 fails in step 0 and goes on, while the first worker of pipeline 0 waits in that step.
TEST(LayersThatCommunicate, AreNotPairedWithThoseOfAnotherStepAfterAFailure) {
  const Case one{"1F1B", Schedule::k1F1B, kOneEach};
  with_seeds(one, [&](Place& place) {
    const bool first = place.worker.rank() < 2;
    int left = first && place.pipeline == 1 ? 3 : -1;
    Layers layers;
    layers.add_function("fails", [&left](const at::Tensor& x) {
      if (left > 0 && --left == 0) throw std::runtime_error("once");
      return x;
    });
    layers.add<ParallelBlock>(0.0, place.group, &place.pace);
    layers.add<ParallelBlock>(10.0, place.group, &place.pace);
    PipelineOptions options = options_of(one, place.pipeline);
    options.balance = {2, 1};
    Pipeline pipe(place.worker, layers, options);
    std::vector<std::string> errors;
    for (int step = 0; step <= place.pipeline; ++step)
      errors.push_back(error_text([&] { pipe.train_step(input_of(0), target_of(0), mean_square); }));
    if (!first) return;  // these may wait for each other until the limit of their group
    if (place.pipeline == 1) EXPECT_THAT(errors[0], HasSubstr("once"));
    EXPECT_THAT(errors.back(), AllOf(HasSubstr("of step 0"), HasSubstr("of step 1")));
  });
}

/// How long a step lasts whose layers take 1 ms in a forward.
Duration makespan_of_step(Place& place, bool communicates) {
  const Case one{"1F1B", Schedule::k1F1B, kOneEach, ActivationCheckpoint::kAlways};
  Layers layers;
  for (int stage = 0; stage < 2; ++stage) {
    layers.add<WholeBlock>(10.0 * stage);
    layers.add_function("takes time", [&place, communicates](const at::Tensor& x) {
      place.pace.executor.sleep(std::chrono::milliseconds(1));
      return communicates ? average(place.group)(x) : x;
    });
  }
  PipelineOptions options = options_of(one, place.pipeline);
  options.balance = {2, 2};
  options.name += communicates ? " with a group" : " without a group";
  Pipeline pipe(place.worker, layers, options);
  pipe.train_step(input_of(0), target_of(0), mean_square);
  return pipe.last_step().measured.makespan;
}

TEST(LayersThatCommunicate, AreRepeatedInTheirTurnAndOthersInIdleTime) {
  with_seeds({"1F1B", Schedule::k1F1B, kOneEach}, [](Place& place) {
    const Duration idle = makespan_of_step(place, false), in_turn = makespan_of_step(place, true);
    EXPECT_GE(to_seconds(in_turn - idle), 0.9e-3);
  });
}

TEST(LayersThatCommunicate, MustDoSoInTheForwardIfTheyDoInItsRepetition) {
  const Case one{"interleaved", Schedule::kInterleaved, kLooped, ActivationCheckpoint::kAlways};
  with_seeds(one, [&](Place& place) {
    Layers layers;
    for (int layer = 0; layer < 4; ++layer) {
      layers.add<WholeBlock>(10.0 * layer);
      layers.add_function("only with gradients", [group = place.group, &place](const at::Tensor& x) {
        if (at::GradMode::is_enabled()) group.barrier();
        return Paced::apply(x, reinterpret_cast<std::int64_t>(&place.pace));
      });
    }
    PipelineOptions options = options_of(one, place.pipeline);
    options.balance.assign(4, 2);
    Pipeline pipe(place.worker, layers, options);
    EXPECT_THAT(error_text([&] { pipe.train_step(input_of(0), target_of(0), mean_square); }),
                AllOf(HasSubstr("barrier in the repeated forward"), HasSubstr("kNever")));
  });
}

/// Blocks of which each is computed again for its backward.
template <class Block>
struct SegmentsImpl : torch::nn::Module {
  explicit SegmentsImpl(std::vector<Block> given) : blocks(std::move(given)) {
    for (std::size_t i = 0; i < blocks.size(); ++i)
      register_module(fmt::format("block{}", i), blocks[i].ptr());
  }
  at::Tensor forward(at::Tensor x) {
    for (const Block& block : blocks)
      x = recomputed([module = block.ptr()](const at::Tensor& input) { return module->forward(input); }, x);
    return x;
  }
  std::vector<Block> blocks;
};
template <class Block>
struct Segments : torch::nn::ModuleHolder<SegmentsImpl<Block>> {
  using torch::nn::ModuleHolder<SegmentsImpl<Block>>::ModuleHolder;
};

constexpr std::size_t kBlocks = 3;

/// Makes blocks from (seed, group, pace).
template <class Block>
Segments<Block> segments_of(const Group& group, Pace& pace) {
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < kBlocks; ++i) blocks.emplace_back(10.0 * static_cast<double>(i), group, &pace);
  return Segments<Block>(std::move(blocks));
}

/// Runs `body` on four ranks, of which 0 and 1 have parts of one model, and 2 and 3 of another copy.
void on_parts_and_copies(const std::function<void(const Rank&, const Group&, const Group&, Pace&)>& body) {
  const auto seeds = torchspan::testing::number_from("TORCHSPAN_CASES", std::uint64_t{3});
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    on_ranks(
        4,
        [&](const Rank& self) {
          SCOPED_TRACE(::testing::Message() << "seed " << seed);
          const Group parts = self.group.split(self.rank / 2, self.rank);
          const Group copies = self.group.split(self.rank % 2, self.rank);
          Pace pace(self.runtime.executor, 100 * seed + static_cast<std::uint64_t>(self.rank));
          body(self, parts, copies, pace);
        },
        seed);
  }
}

/// Trains with this rank's half of the rows, and compares the weights with those of one process.
void expect_training(const Rank& self, const std::function<at::Tensor(const at::Tensor&)>& model,
                     optim::Optimizer& optimizer, const std::function<void(const Expected&)>& compare) {
  Expected expected(kBlocks);
  std::vector<at::Tensor> parameters;
  for (WholeBlock& block : expected.blocks) {
    for (const at::Tensor& parameter : block->parameters()) parameters.push_back(parameter);
  }
  optim::Optimizer plain(parameters, optim::Adam{.lr = 0.05});
  for (int step = 0; step < 3; ++step) {
    at::Tensor x = input_of(step);
    for (WholeBlock& block : expected.blocks) x = block(x);
    plain.zero_grad();
    mean_square(x, target_of(step)).backward();
    plain.step();
    const auto mine = [&](const at::Tensor& rows) { return rows.chunk(2)[self.rank / 2].clone(); };
    optimizer.zero_grad();
    mean_square(model(mine(input_of(step)).requires_grad_()), mine(target_of(step))).backward();
    optimizer.step();
  }
  compare(expected);
}

void expect_weights(const TensorParallelModule& ours, const torch::nn::Module& whole) {
  const auto wanted = whole.named_parameters();
  for (const auto& item : ours.named_parameters()) {
    const at::Tensor expected = part_of(ours, item.key(), wanted[item.key()]);
    EXPECT_TRUE(at::allclose(item.value(), expected, 1e-9, 1e-11)) << item.key();
  }
}

/// Outside of pipelines, one thread of each rank runs one graph, so that what is computed again has one order.
TEST(LayersThatCommunicate, MayBeComputedAgainUnderDataParallel) {
  on_parts_and_copies([](const Rank& self, const Group& parts, const Group& copies, Pace& pace) {
    const auto net = segments_of<ParallelBlock>(parts, pace);
    DistributedDataParallel<Segments<ParallelBlock>> model(net, copies);
    optim::Optimizer optimizer(*net, optim::Adam{.lr = 0.05});
    expect_training(
        self, [&](const at::Tensor& x) { return model(x); }, optimizer,
        [&](const Expected& expected) {
          for (std::size_t i = 0; i < kBlocks; ++i) {
            expect_weights(*net->blocks[i]->up, *expected.blocks[i]->up);
            expect_weights(*net->blocks[i]->down, *expected.blocks[i]->down);
          }
        });
  });
}

TEST(LayersThatCommunicate, MayBeComputedAgainWhileTheirParametersAreSharded) {
  on_parts_and_copies([](const Rank& self, const Group& parts, const Group& copies, Pace& pace) {
    auto net = segments_of<Sharded<ParallelBlock>>(parts, pace);
    FullyShardedDataParallel<Segments<Sharded<ParallelBlock>>> model(net, copies);
    optim::Optimizer optimizer(*net, optim::Adam{.lr = 0.05});
    expect_training(
        self, [&](const at::Tensor& x) { return model(x); }, optimizer,
        [&](const Expected& expected) {
          model.with_full_parameters([&] {
            for (std::size_t i = 0; i < kBlocks; ++i) {
              const auto& block = *net->blocks[i].ptr();
              expect_weights(*block.up, *expected.blocks[i]->up);
              expect_weights(*block.down, *expected.blocks[i]->down);
            }
          });
        });
  });
}

}  // namespace
}  // namespace torchspan::sharded::communicating_layers_test
