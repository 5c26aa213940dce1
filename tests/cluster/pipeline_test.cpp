// Pipelines across real processes.
// peer: async_pipe async_event_loop
#include <array>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <random>

#include <torch/torch.h>

#include <torchspan/collective.h>
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/pipeline.h>
#include <torchspan/session.h>

#include "tests/support/cluster_main.h"
#include "tests/support/environment.h"

namespace torchspan::pipeline_test {
namespace {

using pipeline::ActivationCheckpoint;
using pipeline::Layers;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Schedule;
using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::ProcessWorld;
using testing::require;

struct DenseImpl : torch::nn::Module {
  DenseImpl(std::int64_t in, std::int64_t out, std::uint64_t seed) {
    weight =
        register_parameter("weight", at::randn({in, out}, at::detail::createCPUGenerator(seed), at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::matmul(x, weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Dense);

at::Tensor numbers(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble);
}
at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

constexpr std::int64_t kWidth = 300;  // activations of some hundred kilobytes: more than a ring holds

/// Layers a b c, then a again: the last use is on the first worker.
Layers model() {
  Layers layers;
  const auto a = layers.add<Dense>(kWidth, kWidth, 1);
  const auto kept = a;
  layers.add<Dense>(kWidth, kWidth, 2);
  layers.add<Dense>(kWidth, kWidth, 3);
  layers.reuse(kept);
  return layers;
}

/// Each process trains its part, then the whole model plainly, and compares.
void train() {
  Session session(WorkerOptions::from_env());
  for (const Schedule schedule : {Schedule::kArrival, Schedule::kGPipe, Schedule::k1F1B}) {
    Pipeline pipe(session.worker(), model(),
                  {.balance = {1, 1, 1},
                   .micro_batches = 4,
                   .schedule = schedule,
                   .checkpoint = ActivationCheckpoint::kExceptLast});
    std::vector<Dense> plain{Dense(kWidth, kWidth, 1), Dense(kWidth, kWidth, 2), Dense(kWidth, kWidth, 3)};
    for (std::uint64_t step = 0; step < 3; ++step) {
      const std::int64_t rows = 600 + 7 * static_cast<std::int64_t>(step);
      const at::Tensor x = numbers({rows, kWidth}, 10 + step), y = numbers({rows, kWidth}, 20 + step);
      const double loss = pipe.train_step(x, y, mean_square);
      const at::Tensor expected =
          mean_square(plain[0]->forward(plain[2]->forward(plain[1]->forward(plain[0]->forward(x)))), y);
      expected.backward();
      require(std::abs(loss - expected.item<double>()) < 1e-12, fmt::format("the loss of step {}", step));
    }
    const at::Tensor mine = pipe.parameters().at(0).grad();
    const at::Tensor expected = plain[session.rank()]->weight.grad();
    require(at::allclose(mine, expected, 1e-10, 1e-12),
            fmt::format("gradients; apart by {}", (mine - expected).abs().max().item<double>()));
    const at::Tensor x = numbers({5, kWidth}, 99);
    const pipeline::Batch output = pipe.infer(x);
    require((output.size() == 1) == (session.rank() == 0), "the output is on the worker of the last use");
  }
  session.shutdown();
}

TEST(PipelineProcesses, TrainLikeThePlainModel) {
  ProcessWorld world(3);
  world.start_all("pipeline.train");
  expect_all_end_well(world, seconds(120));
}

/// Split backwards: the first and the last of `stages` layers have one tied weight. Compares with one process.
void train_split(Session& session, Schedule schedule, int stages) {
  Layers layers;
  std::vector<pipeline::TiedParameter> weights;
  std::vector<Dense> plain;
  for (int stage = 0; stage < stages; ++stage) {
    const auto seed = static_cast<std::uint64_t>(stage) + 1;
    weights.emplace_back(layers.add<Dense>(kWidth, kWidth, seed), "weight");
    plain.emplace_back(kWidth, kWidth, seed);
  }
  layers.tie({weights.front(), weights.back()});
  plain.back()->weight = plain.front()->weight;
  PipelineOptions options{.micro_batches = 6, .schedule = schedule};
  options.balance.assign(static_cast<std::size_t>(stages), 1);
  Pipeline pipe(session.worker(), layers, options);
  for (std::uint64_t step = 0; step < 3; ++step) {
    const at::Tensor x = numbers({200, kWidth}, 10 + step), y = numbers({200, kWidth}, 20 + step);
    const double loss = pipe.train_step(x, y, mean_square);
    at::Tensor z = x;
    for (Dense& layer : plain) z = layer->forward(z);
    const at::Tensor expected = mean_square(z, y);
    expected.backward();
    require(std::abs(loss - expected.item<double>()) < 1e-12, fmt::format("the loss of step {}", step));
  }
  for (int stage = 0; stage < stages; ++stage) {
    const auto module = pipe.module(stage);
    if (!module) continue;
    const at::Tensor mine = module->parameters()[0].grad();
    const at::Tensor expected = plain[static_cast<std::size_t>(stage)]->weight.grad();
    require(at::allclose(mine, expected, 1e-10, 1e-12), fmt::format("the gradient of layer {}", stage));
  }
}

void train_with_split_backwards() {
  Session session(WorkerOptions::from_env());
  train_split(session, Schedule::kZBH1, 2);
  train_split(session, Schedule::kZBH2, 2);
  train_split(session, Schedule::kZB1P, 4);
  train_split(session, Schedule::kZBV, 4);
  train_split(session, Schedule::kDualPipeV, 4);
  session.shutdown();
}

// peer: pipelining `v_shape_schedules`, `grad_with_v_schedule`, `grad_with_split_b_w`,
//   `pipeline_schedule_runtime_custom_sched`
TEST(PipelineProcesses, TrainLikeThePlainModelWithSplitBackwardsAndATiedWeight) {
  ProcessWorld world(2);
  world.start_all("pipeline.train_with_split_backwards");
  expect_all_end_well(world, seconds(120));
}

/// Two replicas of two stages with uneven batches and a tied weight; compares with one process.
void train_replicas() {
  Session session(WorkerOptions::from_env());
  for (const Schedule schedule : {Schedule::k1F1B, Schedule::kZBH1}) {
    Layers layers;
    std::vector<pipeline::TiedParameter> weights;
    std::vector<Dense> plain;
    for (std::uint64_t layer = 1; layer <= 4; ++layer) {
      weights.emplace_back(layers.add<Dense>(kWidth, kWidth, layer), "weight");
      plain.emplace_back(kWidth, kWidth, layer);
    }
    layers.tie({weights.front(), weights.back()});
    plain.back()->weight = plain.front()->weight;
    Pipeline pipe(session.worker(), layers,
                  {.balance = {2, 2}, .replicas = 2, .micro_batches = 3, .schedule = schedule});
    for (std::uint64_t step = 0; step < 3; ++step) {
      const at::Tensor x = numbers({300, kWidth}, 10 + step), y = numbers({300, kWidth}, 20 + step);
      const auto part = [&](const at::Tensor& rows) {
        return pipe.replica() == 0 ? rows.narrow(0, 0, 200) : rows.narrow(0, 200, 100);
      };
      const double loss = pipe.train_step(part(x), part(y), mean_square);
      at::Tensor z = x;
      for (Dense& layer : plain) z = layer->forward(z);
      const at::Tensor expected = mean_square(z, y);
      expected.backward();
      require(std::abs(loss - expected.item<double>()) < 1e-12, fmt::format("the loss of step {}", step));
    }
    for (int layer = 0; layer < 4; ++layer) {
      const auto module = pipe.module(layer);
      if (!module) continue;
      const at::Tensor mine = module->parameters()[0].grad();
      const at::Tensor expected = plain[static_cast<std::size_t>(layer)]->weight.grad();
      require(at::allclose(mine, expected, 1e-10, 1e-12), fmt::format("the gradient of layer {}", layer));
    }
  }
  session.shutdown();
}

// peer: pipelining `manual_with_data_parallel`
TEST(PipelineProcesses, ReplicasTrainLikeThePlainModel) {
  ProcessWorld world(4);
  world.start_all("pipeline.train_replicas");
  expect_all_end_well(world, seconds(120));
}

/// Every process seeds its generator with the same value, as programs do; each gathers all initial weights.
void make_weights() {
  Session session(WorkerOptions::from_env());
  torch::manual_seed(3);
  Layers layers;
  for (int layer = 0; layer < 3; ++layer) layers.add<torch::nn::Linear>(4, 4);
  {
    Pipeline pipe(session.worker(), layers, {.balance = {1, 1, 1}});
    const at::Tensor mine = pipe.parameters().at(0).detach();
    const auto* bytes = static_cast<const std::byte*>(mine.data_ptr());
    const auto all = session.worker().all_gather_bytes(Bytes(bytes, bytes + mine.nbytes()));
    torch::manual_seed(3);
    require(all.at(0) != all.at(1) && all.at(1) != all.at(2) && all.at(0) != all.at(2),
            "stages have different initial weights");
    // The same model on one worker.
    Pipeline alone(session.worker(), layers, {.balance = {3}, .workers = {session.worker().name()}});
    for (std::size_t layer = 0; layer < 3; ++layer) {
      const at::Tensor weight = alone.parameters().at(2 * layer).detach();
      require(std::memcmp(weight.data_ptr(), all.at(layer).data(), weight.nbytes()) == 0,
              fmt::format("the weights of layer {} do not depend on the split", layer));
    }
  }
  session.shutdown();
}

TEST(PipelineProcesses, InitialWeightsDoNotDependOnTheSplit) {
  ProcessWorld world(3);
  world.start_all("pipeline.make_weights");
  expect_all_end_well(world, seconds(120));
}

/// One of each event that is logged at debug level.
void do_something() {
  Session session(WorkerOptions::from_env());
  {
    const collective::Group group = session.group();
    Layers layers;
    for (int layer = 0; layer < 2; ++layer) layers.add<torch::nn::Linear>(2, 2);
    Pipeline pipe(session.worker(), layers, {.balance = {1, 1}});
    pipe.infer(at::ones({2, 2}));
    torch::nn::Linear local(2, 2);
    optim::DistributedOptimizer optimizer(session, optim::SGD{.lr = 0.1}, {local});
    autograd::Context context(session.worker());
    context.backward(local(at::ones({1, 2})).sum());
    optimizer.step(context);
  }
  session.shutdown();
}

TEST(PipelineProcesses, LogTheirActionsAtDebugLevel) {
  using ::testing::ContainsRegex;
  using ::testing::HasSubstr;
  using ::testing::Not;
  for (const bool debug : {false, true}) {
    ProcessWorld world(2);
    for (int rank = 0; rank < 2; ++rank)
      world.start(rank, "pipeline.do_something", {{"TORCHSPAN_LOG_LEVEL", debug ? "debug" : "warning"}});
    expect_all_end_well(world, seconds(120));
    const std::string text = world.process(0).output();
    if (!debug) {
      EXPECT_THAT(text, Not(HasSubstr("debug")));
      continue;
    }
    EXPECT_THAT(text,
                ContainsRegex("torchspan.worker0. debug: process [0-9]+ joined as rank 0 of 2, listening"));
    EXPECT_THAT(text + world.process(1).output(), ContainsRegex("worker 'worker[01]' .rank [01]. connected"));
    EXPECT_THAT(text, HasSubstr("group of 2 ranks, this is rank 0"));
    EXPECT_THAT(text, HasSubstr("pipeline 'pipeline': 2 layers, balance [1, 1]"));
    EXPECT_THAT(text, HasSubstr("pipeline 'pipeline': step 0, 1 micro-batches in "));
    EXPECT_THAT(text, HasSubstr("backward pass "));
    EXPECT_THAT(text, HasSubstr("optimizer step on 1 workers"));
  }
}

/// Ends or stops its process in the second micro-batch of the second step.
struct DyingLayerImpl : torch::nn::Module {
  DyingLayerImpl(bool given, int with) : is_victim(given), signal(with) {
    weight = register_parameter("weight", at::ones({1}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (is_victim && ++calls == 6) {
      std::ofstream(std::string(std::getenv("TORCHSPAN_RUNTIME_DIR")) + "/struck") << "now";
      raise(signal);
    }
    return x * weight;
  }
  bool is_victim;
  int signal;
  int calls = 0;
  at::Tensor weight;
};
TORCH_MODULE(DyingLayer);

/// Trains until a worker dies or stops; the exit code says whether the error named it.
void be_struck(int signal, int replicas = 1) {
  Session session(WorkerOptions::from_env());
  session.runtime().log.set_level(LogLevel::kOff);
  const int victim = std::atoi(std::getenv("TEST_VICTIM"));
  Layers layers;
  const int stages = static_cast<int>(session.world_size()) / replicas;
  for (int stage = 0; stage < stages; ++stage)
    layers.add<DyingLayer>(session.rank() == victim && stage == victim % stages, signal);
  PipelineOptions options{.replicas = replicas, .micro_batches = 4};
  options.balance.assign(static_cast<std::size_t>(stages), 1);
  options.checkpoint = ActivationCheckpoint::kNever;
  Pipeline pipe(session.worker(), layers, options);
  const at::Tensor x = at::ones({8, 1}, at::kDouble);
  const auto loss = [](const at::Tensor& output, const at::Tensor&) { return output.mean(); };
  pipe.train_step(x, x, loss);
  // The victim must not die before all workers have ended the first step.
  const auto ended_by = [](int rank) {
    return fmt::format("{}/first{}", std::getenv("TORCHSPAN_RUNTIME_DIR"), rank);
  };
  std::ofstream(ended_by(session.rank())) << "now";
  for (int rank = 0; session.rank() == victim && rank < session.world_size(); ++rank) {
    while (!std::filesystem::exists(ended_by(rank))) session.runtime().executor.yield();
  }
  try {
    pipe.train_step(x, x, loss);
  } catch (const Error& error) {
    const std::string text = error.what();
    std::fprintf(stderr, "%s\n", text.c_str());
    const bool named = text.find(fmt::format("worker{}", victim)) != std::string::npos &&
                       text.find("step 1") != std::string::npos;
    std::fflush(nullptr);
    _exit(named ? 0 : 3);  // the session cannot end gracefully
  }
  throw std::runtime_error("the step succeeded");
}
void be_killed() { be_struck(SIGKILL); }
void be_stopped() { be_struck(SIGSTOP); }
void be_killed_in_a_replica() { be_struck(SIGKILL, 2); }

class Struck : public ::testing::TestWithParam<int> {
 protected:
  /// Starts a world and returns once its victim has died or stopped. `stopped_limit`: s; how long a worker may be stopped.
  void strike(ProcessWorld& world, const std::string& scenario, int ranks, const std::string& stopped_limit) {
    for (int rank = 0; rank < ranks; ++rank) {
      world.start(rank, scenario,
                  {{"TEST_VICTIM", std::to_string(GetParam())},
                   {"TORCHSPAN_STOPPED_LIMIT", stopped_limit},
                   {"TORCHSPAN_RUNTIME_DIR", world.folder()}});
    }
    const Deadline deadline = world.executor().deadline_in(seconds(60));
    while (!std::filesystem::exists(world.folder() + "/struck")) {
      ASSERT_FALSE(deadline.passed(world.executor().now())) << "the victim did not end";
      world.executor().sleep(std::chrono::milliseconds(1));
    }
  }
  void expect_survivors_named_it(ProcessWorld& world, int ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == GetParam()) continue;
      testing::Process& survivor = world.process(static_cast<std::size_t>(rank));
      EXPECT_TRUE(survivor.wait(world.executor(), seconds(40))) << "rank " << rank << " hangs";
      EXPECT_EQ(survivor.exit_code(), 0) << survivor.output();
    }
  }
};

/// A stopped worker would not be noticed: only the end of its connections ends the step.
TEST_P(Struck, AKilledWorkerEndsTheStepAtOnce) {
  ProcessWorld world(3);
  strike(world, "pipeline.be_killed", 3, "600");
  expect_survivors_named_it(world, 3);
}

TEST_P(Struck, AKilledWorkerOfAReplicaEndsTheStepOfAllReplicas) {
  ProcessWorld world(4);
  strike(world, "pipeline.be_killed_in_a_replica", 4, "600");
  expect_survivors_named_it(world, 4);
}

TEST_P(Struck, AStoppedWorkerEndsTheStepForTheOthers) {
  ProcessWorld world(3);
  strike(world, "pipeline.be_stopped", 3, "1");
  expect_survivors_named_it(world, 3);
  testing::Process& victim = world.process(static_cast<std::size_t>(GetParam()));
  victim.kill(SIGCONT);
  EXPECT_TRUE(victim.wait(world.executor(), seconds(40))) << "the stopped worker hangs";
}

/// A worker that a debugger stops in a step, for longer than any worker waits by default.
void be_paused() {
  Session session(WorkerOptions::from_env());
  {
    Layers layers;
    for (int stage = 0; stage < 3; ++stage) layers.add<DyingLayer>(stage == 1, SIGSTOP);
    PipelineOptions options{.balance = {1, 1, 1}, .micro_batches = 4};
    options.checkpoint = ActivationCheckpoint::kNever;
    Pipeline pipe(session.worker(), layers, options);
    const at::Tensor x = at::ones({8, 1}, at::kDouble);
    for (int step = 0; step < 3; ++step)
      pipe.train_step(x, x, [](const at::Tensor& output, const at::Tensor&) { return output.mean(); });
  }
  session.shutdown();
}

/// Starts a world whose worker 1 is stopped in its second step; returns once it is.
void pause_world(ProcessWorld& world, const std::string& limit) {
  for (int rank = 0; rank < 3; ++rank) {
    world.start(rank, "pipeline.be_paused",
                {{"TORCHSPAN_STOPPED_LIMIT", limit}, {"TORCHSPAN_RUNTIME_DIR", world.folder()}});
  }
  const Deadline deadline = world.executor().deadline_in(seconds(60));
  while (!std::filesystem::exists(world.folder() + "/struck")) {
    ASSERT_FALSE(deadline.passed(world.executor().now())) << "the worker was not stopped";
    world.executor().sleep(std::chrono::milliseconds(10));
  }
}

TEST(PipelineProcesses, AWorkerMayBeStoppedUpToTheLimit) {
  ProcessWorld without_limit(3), with_limit(3);
  pause_world(without_limit, "0");
  pause_world(with_limit, "60");
  with_limit.executor().sleep(seconds(7));  // the default is 5
  for (ProcessWorld* world : {&without_limit, &with_limit}) {
    EXPECT_FALSE(world->process(0).wait(world->executor(), seconds(0))) << world->process(0).output();
    world->process(1).kill(SIGCONT);
    expect_all_end_well(*world, seconds(60));
  }
}

TEST(PipelineProcesses, AShorterLimitEndsTheStepAndIsNamed) {
  ProcessWorld world(3);
  pause_world(world, "0.5");
  EXPECT_TRUE(world.process(0).wait(world.executor(), seconds(60)));
  EXPECT_EQ(world.process(0).exit_code(), 1);
  EXPECT_NE(world.process(0).output().find("allow more than 0.5 s with TORCHSPAN_STOPPED_LIMIT"),
            std::string::npos)
      << world.process(0).output();
  world.process(1).kill(SIGCONT);
}

INSTANTIATE_TEST_SUITE_P(Stages, Struck, ::testing::Values(0, 1, 2));

enum class FailsIn { kForward, kBackward, kLoss };

/// Throws in the backward of a micro-batch.
struct FailingBackward : torch::autograd::Function<FailingBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("planted");
  }
};

/// Trainings with overlapping steps in which some batches fail on one worker. All ranks draw the same choices.
class FailingBatches {
 public:
  FailingBatches(Session& session, std::uint64_t seed) : session_(session), random_(seed) {
    for (bool& fails : fails_) fails = draw(3) == 0;
    Layers layers;
    for (int stage = 0; stage < kStages; ++stage) {
      layers.add<Dense>(kWidth, kWidth, static_cast<std::uint64_t>(stage) + 1);
      plain_.emplace_back(kWidth, kWidth, static_cast<std::uint64_t>(stage) + 1);
      auto earlier = std::make_shared<std::map<std::int64_t, int>>();
      layers.add_function("fails", [this, stage, earlier](const at::Tensor& x) -> at::Tensor {
        const bool fails = stage == stage_ && fails_.at(static_cast<std::size_t>(x.size(0) - 1)) &&
                           (*earlier)[x.size(0)]++ >= micro_batch_;
        if (fails && place_ == FailsIn::kForward) throw std::runtime_error("planted");
        return fails && place_ == FailsIn::kBackward ? FailingBackward::apply(x) : x * 1;
      });
    }
    pipe_.emplace(session.worker(), layers,
                  PipelineOptions{.balance = {2, 2, 2},
                                  .micro_batches = micro_batches_,
                                  .schedule = schedule_,
                                  .checkpoint = checkpoint_,
                                  .staleness = 1});
  }

  void run() {
    std::optional<int> in_flight;
    for (int batch = 0; batch < kBatches; ++batch) {
      const bool throws = in_flight && fails_.at(static_cast<std::size_t>(*in_flight));
      expect(in_flight, throws, [&] { return train(batch); });
      in_flight = throws ? std::nullopt : std::optional(batch);  // the call that throws drops its batch
    }
    expect(in_flight, in_flight && fails_.at(static_cast<std::size_t>(*in_flight)),
           [&] { return pipe_->finish(); });
  }

 private:
  static constexpr int kStages = 3, kBatches = 30;

  int draw(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }
  /// Micro-batches have one row more in each batch, by which layers know it.
  at::Tensor rows(int batch, int what) const {
    return numbers({micro_batches_ * (batch + 1), kWidth},
                   100 * static_cast<std::uint64_t>(what) + static_cast<std::uint64_t>(batch));
  }
  double train(int batch) {
    const bool fails = place_ == FailsIn::kLoss && fails_.at(static_cast<std::size_t>(batch));
    return pipe_->train_step(rows(batch, 1), rows(batch, 2),
                             [fails](const at::Tensor& output, const at::Tensor& target) {
                               if (fails) throw std::runtime_error("planted");
                               return mean_square(output, target);
                             });
  }
  /// A call that returns the loss of `batch`, or nothing.
  void expect(std::optional<int> batch, bool throws, const std::function<double()>& call) {
    const std::string where = fmt::format("batch {} on rank {}", batch.value_or(-1), session_.rank());
    for (const at::Tensor& parameter : pipe_->parameters()) parameter.mutable_grad() = at::Tensor();
    double loss = 0;
    std::string failure;
    try {
      loss = call();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    require(throws == !failure.empty(), where + (throws ? " does not fail" : ": " + failure));
    if (throws) return require(failure.find("planted") != std::string::npos, where + ": " + failure);
    require(std::isnan(loss) == !batch, where + " has a loss or not");
    if (!batch) return;
    for (Dense& layer : plain_) layer->zero_grad();
    at::Tensor output = rows(*batch, 1);
    for (Dense& layer : plain_) output = layer->forward(output);
    const at::Tensor expected = mean_square(output, rows(*batch, 2));
    expected.backward();
    require(std::abs(loss - expected.item<double>()) < 1e-12, where + ": the loss");
    const at::Tensor mine = pipe_->parameters().at(0).grad();
    require(mine.defined() &&
                at::allclose(mine, plain_.at(static_cast<std::size_t>(session_.rank()))->weight.grad(), 1e-10,
                             1e-12),
            where + ": the gradients");
  }

  Session& session_;
  std::mt19937_64 random_;
  std::array<bool, kBatches> fails_{};
  const int micro_batches_ = 1 + draw(4), stage_ = draw(kStages), micro_batch_ = draw(micro_batches_);
  const FailsIn place_ = static_cast<FailsIn>(draw(3));
  const Schedule schedule_ =
      std::array{Schedule::kGPipe, Schedule::k1F1B, Schedule::kZBH1}.at(static_cast<std::size_t>(draw(3)));
  const ActivationCheckpoint checkpoint_ =
      draw(2) == 0 ? ActivationCheckpoint::kNever : ActivationCheckpoint::kAlways;
  std::vector<Dense> plain_;
  std::optional<Pipeline> pipe_;
};

void lose_batches() {
  Session session(WorkerOptions::from_env());
  const auto first = testing::number_from("TORCHSPAN_SEED", std::uint64_t{1});
  const auto cases = testing::number_from("TORCHSPAN_CASES", std::uint64_t{6});
  for (std::uint64_t seed = first; seed < first + cases; ++seed) {
    try {
      FailingBatches(session, seed).run();
    } catch (const std::exception& error) {
      throw std::runtime_error(fmt::format("TORCHSPAN_SEED={} TORCHSPAN_CASES=1: {}", seed, error.what()));
    }
  }
  session.shutdown();
}

TEST(PipelineProcesses, ABatchThatFailsInAnOverlappingStepLosesNoOther) {
  ProcessWorld world(3);
  world.start_all("pipeline.lose_batches");
  expect_all_end_well(world, std::chrono::minutes(10));
}

const testing::Scenarios kScenarios("pipeline", {{"train", train},
                                                 {"train_with_split_backwards", train_with_split_backwards},
                                                 {"train_replicas", train_replicas},
                                                 {"lose_batches", lose_batches},
                                                 {"make_weights", make_weights},
                                                 {"do_something", do_something},
                                                 {"be_paused", be_paused},
                                                 {"be_killed", be_killed},
                                                 {"be_killed_in_a_replica", be_killed_in_a_replica},
                                                 {"be_stopped", be_stopped}});

}  // namespace
}  // namespace torchspan::pipeline_test
