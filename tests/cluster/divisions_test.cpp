// Models that are divided in two ways, over real processes, saved and clipped by a program that names the module and the
// optimizer only; and what one process computes.
#include <array>
#include <fmt/format.h>
#include <functional>
#include <limits>
#include <memory>
#include <random>

#include <torch/torch.h>

#include <torchspan/sharded.h>
#include <torchspan/sharded/tensor_parallel.h>
#include <torchspan/torchspan.h>

#include "tests/support/cluster_main.h"

namespace torchspan::divisions_test {
namespace {

using pipeline::Layers;
using pipeline::Pipeline;
using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::ProcessWorld;
using testing::require;

constexpr std::int64_t kWidth = 6;
constexpr double kMaxNorm = 0.05;
constexpr int kSteps = 3;

at::Tensor values(at::IntArrayRef sizes, double seed) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return torch::arange(count, torch::kDouble).mul(0.71).add(seed).sin().reshape(sizes).mul(0.5);
}

torch::nn::Linear linear(double seed) {
  torch::nn::Linear layer(kWidth, kWidth);
  layer->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  layer->weight.copy_(values({kWidth, kWidth}, seed));
  layer->bias.copy_(values({kWidth}, seed + 1));
  return layer;
}

struct WholeBlockImpl : torch::nn::Module {
  explicit WholeBlockImpl(double seed)
      : up(register_module("up", linear(seed))), down(register_module("down", linear(seed + 3))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::tanh(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(WholeBlock);

struct ParallelBlockImpl : torch::nn::Module {
  ParallelBlockImpl(double seed, const collective::Group& group)
      : up(register_module("up", ColumnParallelLinear(linear(seed), group))),
        down(register_module("down", RowParallelLinear(linear(seed + 3), group))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::tanh(up(x))); }
  ColumnParallelLinear up;
  RowParallelLinear down;
};
TORCH_MODULE(ParallelBlock);

at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

/// The same training in one process: the norms before clipping, and the parameters at the end.
struct Expected {
  Expected() : blocks{WholeBlock(1), WholeBlock(10)} {
    std::vector<at::Tensor> parameters;
    for (WholeBlock& block : blocks) {
      for (const at::Tensor& parameter : block->parameters()) parameters.push_back(parameter);
    }
    optim::Optimizer optimizer(parameters, optim::Adam{.lr = 0.02});
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      mean_square(blocks[1](blocks[0](values({8, kWidth}, step))), values({8, kWidth}, step + 50)).backward();
      norms.push_back(optimizer.clip_grad_norm(kMaxNorm));
      optimizer.step();
    }
  }
  std::vector<WholeBlock> blocks;
  std::vector<double> norms;
};

std::string folder() {
  const char* value = std::getenv("TEST_FOLDER");
  return value == nullptr ? "" : value;
}

/// Ranks 0 and 1 have halves of the first stage, ranks 2 and 3 of the second one: two pipelines.
void train_pipelines_of_tensor_parallel_layers() {
  Session session(WorkerOptions::from_env());
  {
    const Expected expected;
    const int half = session.rank() % 2;
    const collective::Group stage = session.group().split(session.rank() / 2, session.rank());
    Layers layers;
    layers.add<ParallelBlock>(1.0, stage);
    layers.add<ParallelBlock>(10.0, stage);
    Pipeline pipe(session.worker(), layers,
                  {.balance = {1, 1},
                   .workers = {fmt::format("worker{}", half), fmt::format("worker{}", half + 2)},
                   .micro_batches = 2,
                   .name = fmt::format("half {}", half)});
    optim::Optimizer optimizer(
        {optim::ParamGroup(pipe.parameters(), optim::Adam{.lr = 0.02}, checkpoint::parameter_names(pipe))});
    CheckpointManager manager(session, {.directory = folder()});
    manager.add("model", pipe);
    manager.add("optimizer", optimizer);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      pipe.train_step(values({8, kWidth}, step), values({8, kWidth}, step + 50), mean_square);
      const double wanted = expected.norms[static_cast<std::size_t>(step)];
      // Both ways to clip; the second one finds what the first one has left.
      const double first = step == 1 ? optimizer.clip_grad_norm(kMaxNorm) : pipe.clip_grad_norm(kMaxNorm);
      require(std::abs(first - wanted) < 1e-10,
              fmt::format("the norm of step {} is {}, not {}", step, first, wanted));
      const double second = step == 1 ? pipe.clip_grad_norm(1e9) : optimizer.clip_grad_norm(1e9);
      require(std::abs(second - std::min(wanted, kMaxNorm)) < 1e-5,
              fmt::format("the norm after clipping is {}", second));
      optimizer.step();
    }
    manager.save(kSteps);
    manager.wait();
    if (session.rank() == 0) {
      const Checkpoint saved = Checkpoint::newest(folder());
      for (int layer = 0; layer < 2; ++layer) {
        for (const auto& item : expected.blocks[static_cast<std::size_t>(layer)]->named_parameters()) {
          const std::string name = fmt::format("model.layers.{}.{}", layer, item.key());
          require(at::allclose(saved.read(name), item.value(), 1e-9, 1e-12), name);
        }
      }
      const std::string moment = "optimizer.group.0.parameter.layers.1.up.weight.exp_avg";
      require(saved.read(moment).sizes() == at::IntArrayRef({kWidth, kWidth}), moment);
    }
    session.group().barrier();
    // The scaler agrees over all parts and stages: one that is not finite makes all skip.
    optim::GradScaler scaler;
    pipe.train_step(values({8, kWidth}, 0), values({8, kWidth}, 50), mean_square);
    if (session.rank() == 3)
      pipe.parameters()[0].mutable_grad().fill_(std::numeric_limits<double>::infinity());
    require(!scaler.step(optimizer), "the step was not skipped");
  }
  session.shutdown();
}

// peer: fsdp `test_3d_mlp_with_nd_mesh`: differs: pipelines of tensor-parallel layers
TEST(Divisions, PipelinesOfTensorParallelLayersAreClippedAndSavedAsOneModel) {
  const testing::TemporaryFolder place;
  ProcessWorld world(4);
  for (int rank = 0; rank < 4; ++rank)
    world.start(rank, "divisions.train_pipelines_of_tensor_parallel_layers", {{"TEST_FOLDER", place.path()}});
  expect_all_end_well(world, seconds(120));
}

/// A layer that takes another time in every call and on every rank.
auto work_of(int rank) {
  return [random = std::make_shared<std::mt19937_64>(static_cast<std::uint64_t>(rank))](const at::Tensor& x) {
    at::Tensor square = torch::ones({48, 48});
    for (std::uint64_t i = (*random)() % 60; i > 0; --i) square = torch::mm(square, square).clamp(0, 1);
    return x + 0 * square[0][0].item<double>();
  };
}

/// Two pipelines of layers that have halves, under schedules that leave workers idle at different times.
void train_interleaved_pipelines() {
  Session session(WorkerOptions::from_env());
  {
    using pipeline::Schedule;
    const int half = session.rank() % 2;
    const collective::Group stage = session.group().split(session.rank() / 2, session.rank());
    std::vector<WholeBlock> whole;
    for (int layer = 0; layer < 4; ++layer) whole.emplace_back(10.0 * layer);
    const std::vector<std::pair<Schedule, std::vector<int>>> schedules{{Schedule::kInterleaved, {0, 2, 0, 2}},
                                                                       {Schedule::kZB1P, {0, 2, 0, 2}},
                                                                       {Schedule::kZBV, {0, 2, 2, 0}},
                                                                       {Schedule::kDualPipeV, {0, 2, 2, 0}}};
    for (const auto& [schedule, workers] : schedules) {
      Layers layers;
      for (int layer = 0; layer < 4; ++layer) {
        layers.add<ParallelBlock>(10.0 * layer, stage);
        layers.add_function("work", work_of(session.rank()));
      }
      pipeline::PipelineOptions options{
          .balance = {2, 2, 2, 2},
          .micro_batches = 8,
          .schedule = schedule,
          .name = fmt::format("half {}, schedule {}", half, static_cast<int>(schedule))};
      for (const int worker : workers) options.workers.push_back(fmt::format("worker{}", worker + half));
      Pipeline pipe(session.worker(), layers, options);
      for (int step = 0; step < 6; ++step) {
        const at::Tensor input = values({16, kWidth}, step), target = values({16, kWidth}, step + 50);
        const double loss = pipe.train_step(input, target, mean_square);
        at::Tensor wanted = input;
        for (WholeBlock& block : whole) wanted = block(wanted);
        const double expected = mean_square(wanted, target).item<double>();
        require(std::abs(loss - expected) < 1e-12,
                fmt::format("{}, step {}: the loss is {}, not {}", options.name, step, loss, expected));
      }
      // The gradients of all steps, of which each is a mean over the rows.
      for (WholeBlock& block : whole) block->zero_grad();
      for (int step = 0; step < 6; ++step) {
        at::Tensor x = values({16, kWidth}, step);
        for (WholeBlock& block : whole) x = block(x);
        mean_square(x, values({16, kWidth}, step + 50)).backward();
      }
      for (int layer = 0; layer < 4; ++layer) {
        const auto module = std::dynamic_pointer_cast<ParallelBlockImpl>(pipe.module(2 * layer));
        if (!module) continue;
        const WholeBlock& block = whole[static_cast<std::size_t>(layer)];
        const auto part = static_cast<std::size_t>(stage.rank());
        for (const auto& [ours, theirs] :
             {std::pair(module->up->weight.grad(), block->up->weight.grad().chunk(2, 0)[part]),
              std::pair(module->down->weight.grad(), block->down->weight.grad().chunk(2, 1)[part])}) {
          require(at::allclose(ours, theirs, 1e-9, 1e-12),
                  fmt::format("{}: the gradient of layer {}", options.name, layer));
        }
      }
    }
  }
  session.shutdown();
}

TEST(Divisions, InterleavedPipelinesOfTensorParallelLayersTrainAsInOneProcess) {
  ProcessWorld world(4);
  world.start_all("divisions.train_interleaved_pipelines");
  expect_all_end_well(world, seconds(120));
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const collective::Group& halves)
      : first(register_module("first", Sharded<ParallelBlock>(1.0, halves))),
        second(register_module("second", Sharded<ParallelBlock>(10.0, halves))) {}
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x)); }
  Sharded<ParallelBlock> first, second;
};
TORCH_MODULE(Net);

/// Saves and restores with the module and the optimizer only, as programs without divided state do.
void train_sharded_tensor_parallel_layers() {
  Session session(WorkerOptions::from_env());
  {
    const Expected expected;
    const int halves = session.world_size() == 4 ? 2 : 1;  // on two ranks, the layers are whole in each
    const collective::Group parts = session.group().split(session.rank() / halves, session.rank());
    const collective::Group shards = session.group().split(session.rank() % halves, session.rank());
    Net net(parts);
    FullyShardedDataParallel<Net> model(net, shards);
    optim::Optimizer optimizer(*net, optim::Adam{.lr = session.world_size() == 4 ? 0.02 : 7});
    CheckpointManager manager(session, {.directory = folder()});
    manager.add("model", net);
    manager.add("optimizer", optimizer);
    const auto first = static_cast<int>(manager.restore_or(0));
    const int last = session.world_size() == 4 ? 1 : kSteps;
    for (int step = first; step < last; ++step) {
      optimizer.zero_grad();
      mean_square(model(values({8, kWidth}, step)), values({8, kWidth}, step + 50)).backward();
      const double norm = optimizer.clip_grad_norm(kMaxNorm),
                   wanted = expected.norms[static_cast<std::size_t>(step)];
      require(std::abs(norm - wanted) < 1e-10,
              fmt::format("the norm of step {} is {}, not {}", step, norm, wanted));
      optimizer.step();
    }
    manager.save(last);
    manager.wait();
    if (session.rank() == 0 && last == kSteps) {
      const Checkpoint saved = Checkpoint::newest(folder());
      const std::array<const char*, 2> names{"first", "second"};
      for (std::size_t block = 0; block < 2; ++block) {
        for (const auto& item : expected.blocks[block]->named_parameters()) {
          const std::string name = fmt::format("model.{}.{}", names[block], item.key());
          require(at::allclose(saved.read(name), item.value(), 1e-9, 1e-12), name);
        }
      }
    }
    session.group().barrier();
  }
  session.shutdown();
}

TEST(Divisions, ShardedTensorParallelLayersContinueOnOtherNumbersOfRanks) {
  const testing::TemporaryFolder place;
  for (const int ranks : {4, 2}) {
    ProcessWorld world(ranks);
    for (int rank = 0; rank < ranks; ++rank)
      world.start(rank, "divisions.train_sharded_tensor_parallel_layers", {{"TEST_FOLDER", place.path()}});
    expect_all_end_well(world, seconds(120));
  }
}

/// A data-parallel part under ZeRO whose backward passes belong to a distributed autograd context, as in a program that also
/// has remote tables.
void train_zero_in_contexts() {
  Session session(WorkerOptions::from_env());
  {
    const collective::Group group = session.group();
    WholeBlock mine(1), replica(1);
    DistributedDataParallel<WholeBlock> sharded(mine, group), plain(replica, group);
    ZeroRedundancyOptimizer zero(sharded, optim::Adam{.lr = 0.02});
    optim::Optimizer optimizer(*replica, optim::Adam{.lr = 0.02});
    const auto loss_of = [&](auto& model, int step) {
      const at::Tensor rows = values({4, kWidth}, 10 * step + session.rank());
      return mean_square(model(rows), values({4, kWidth}, 50));
    };
    for (int step = 0; step < kSteps; ++step) {
      autograd::Context context(session.worker());
      context.backward(loss_of(sharded, step));
      const auto gradient_of = [&](const at::Tensor& parameter) { return context.gradient(parameter); };
      if (step == 1) {  // they are not in .grad
        for (const auto& call : {std::function<void()>([&] { zero.step(); }),
                                 std::function<void()>([&] { zero.clip_grad_norm(kMaxNorm); })}) {
          std::string error;
          try {
            call();
          } catch (const Error& thrown) {
            error = thrown.message();
          }
          require(error.find("gradient_of") != std::string::npos, "advice, not: " + error);
        }
      }
      const double norm = zero.clip_grad_norm(kMaxNorm, 2, gradient_of);
      zero.step(gradient_of);
      optimizer.zero_grad();
      loss_of(plain, step).backward();
      const double wanted = optimizer.clip_grad_norm(kMaxNorm);
      optimizer.step();
      require(std::abs(norm - wanted) < 1e-12,
              fmt::format("the norm of step {} is {}, not {}", step, norm, wanted));
    }
    const auto expected = replica->named_parameters();
    for (const auto& item : mine->named_parameters())
      require(at::allclose(item.value(), expected[item.key()], 1e-10, 1e-12), item.key());
  }
  session.shutdown();
}

TEST(Divisions, ZeroStepsWithTheGradientsOfADistributedAutogradContext) {
  ProcessWorld world(3);
  world.start_all("divisions.train_zero_in_contexts");
  expect_all_end_well(world, seconds(120));
}

const testing::Scenarios kScenarios(
    "divisions", {{"train_interleaved_pipelines", train_interleaved_pipelines},
                  {"train_pipelines_of_tensor_parallel_layers", train_pipelines_of_tensor_parallel_layers},
                  {"train_sharded_tensor_parallel_layers", train_sharded_tensor_parallel_layers},
                  {"train_zero_in_contexts", train_zero_in_contexts}});

}  // namespace
}  // namespace torchspan::divisions_test
