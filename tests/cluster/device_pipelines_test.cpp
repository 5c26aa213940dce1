// Pipelines whose stages are on devices of several processes: tensors that go through memory which both map, and measured
// stages without a device.
#include <torch/torch.h>

#include <torchspan/pipeline.h>

#include "tests/support/device_worker.h"

namespace torchspan::device_pipelines_test {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr std::int64_t kWidth = 96, kRows = 512,
                       kMicroBatches = 4;  // a micro-batch has 96 KiB, a weight 72 KiB

at::Tensor numbers(std::int64_t rows, std::int64_t seed) {
  const auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return at::randn({rows, kWidth}, generator, at::kDouble).mul_(0.1);
}

/// A stage of a pipeline; it does not move its input.
struct StageImpl : torch::nn::Module {
  StageImpl(c10::Device device, std::int64_t seed)
      : weight(register_parameter("weight", numbers(kWidth, seed).to(device))) {}
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight).tanh(); }
  at::Tensor weight;
};
TORCH_MODULE(Stage);

at::Tensor stage_loss(const at::Tensor& output, const at::Tensor& target) {
  return (output - target.to(output.device())).pow(2).mean();
}

/// A pipeline of two stages, in each replica.
struct PipelineShape {
  pipeline::PipelineOptions options = {};
  bool tied = false;  ///< both stages have the same weight
};

/// Such a pipeline, with a stage on a device of each worker, and the same weights in one process.
class TwoStages {
 public:
  TwoStages(DeviceWorker& self, const PipelineShape& shape)
      : self_(self), here_(test_device(self.worker().rank() % test_device_count())) {
    for (std::int64_t seed = 0; seed < 2; ++seed) alone_.push_back(numbers(kWidth, seed).requires_grad_());
    pipeline::Layers layers;
    const auto first = layers.add<Stage>(here_, std::int64_t{0});
    const auto second = layers.add<Stage>(here_, std::int64_t{1});
    if (shape.tied) {
      layers.tie({{first, "weight"}, {second, "weight"}});
      alone_[1] = alone_[0];
    }
    pipeline::PipelineOptions options = shape.options;
    options.balance = {1, 1};
    options.micro_batches = kMicroBatches;
    pipe_ = std::make_unique<pipeline::Pipeline>(self.worker(), layers, options);
  }

  /// Trains a batch, and compares the gradients of all batches so far with those of one process.
  void train() {
    ++step_;
    const int replicas = self_.worker().world_size() / 2;
    pipe_->train_step(input_of(pipe_->replica()).to(here_), target_of(pipe_->replica()), stage_loss);
    for (int replica = 0; replica < replicas; ++replica)
      (stage_loss(output_of(replica), target_of(replica)) / replicas).backward();
    const int mine = self_.worker().rank() % 2;
    const at::Tensor gradient = pipe_->module(mine)->parameters()[0].grad();
    require(gradient.device() == here_, "the gradient is on " + gradient.device().str());
    require(at::allclose(gradient.cpu(), alone_[static_cast<std::size_t>(mine)].grad(), /*rtol=*/1e-10,
                         /*atol=*/1e-12),
            "the gradient of one process");
  }
  /// Runs forwards only.
  void infer() {
    ++step_;
    const at::NoGradGuard no_grad;
    const int replica = pipe_->replica();
    const pipeline::Batch output = pipe_->infer(input_of(replica).to(here_));
    if (self_.worker().rank() % 2 == 1) {
      require(at::allclose(output.members.at(0).toTensor().cpu(), output_of(replica)),
              "the output of one process");
    }
    pipe_->train_step(input_of(replica).to(here_), target_of(replica), stage_loss);  // the loss alone
  }
  /// How many tensors each worker sends through device memory while all of them run `step`.
  Counts sent_in(const std::function<void()>& step) {
    const Counts before = sent_so_far();
    step();
    Counts sent = sent_so_far();
    for (std::size_t rank = 0; rank < sent.size(); ++rank) sent[rank] -= before[rank];
    return sent;
  }

 private:
  /// The barriers keep the other workers from sending meanwhile, so that all workers get the same numbers.
  Counts sent_so_far() {
    self_.worker().barrier();
    await_returns(self_);
    Counts sent = counts_of(self_.worker(), kSent);
    self_.worker().barrier();
    return sent;
  }
  at::Tensor input_of(int replica) const { return numbers(kRows, 1000 + 10 * step_ + replica); }
  at::Tensor target_of(int replica) const { return numbers(kRows, 1005 + 10 * step_ + replica); }
  at::Tensor output_of(int replica) const {
    return at::matmul(at::matmul(input_of(replica), alone_[0]).tanh(), alone_[1]).tanh();
  }

  DeviceWorker& self_;
  const c10::Device here_;
  std::vector<at::Tensor> alone_;
  std::unique_ptr<pipeline::Pipeline> pipe_;
  std::int64_t step_ = 0;
};

void require_equal(const Counts& sent, const Counts& wanted) {
  std::string text = "tensors that each worker sent through device memory, and should have sent:";
  for (std::size_t rank = 0; rank < wanted.size(); ++rank)
    text += " " + std::to_string(sent.at(rank)) + "/" + std::to_string(wanted[rank]);
  require(sent == wanted, text);
}

/// Trains until the workers send `wanted` tensors through device memory in a step, and some steps more.
void train_two_stages(const PipelineShape& shape, const Counts& wanted) {
  StandInStreams::get().reset(/*polls=*/10);
  DeviceWorker self;
  {
    TwoStages stages(self, shape);
    const auto train = [&] { stages.train(); };
    for (int step = 0; stages.sent_in(train) != wanted; ++step) {  // the workers agree to share memory
      require(step < 200, "after 200 steps, not all tensors of a step go through device memory");
      self.executor().sleep(std::chrono::milliseconds(5));
    }
    for (int step = 0; step < 5; ++step) require_equal(stages.sent_in(train), wanted);
    require_equal(stages.sent_in([&] { stages.infer(); }), Counts(wanted.size(), 0));
  }
  self.shutdown();
  require_no_race();
}

void train_pipeline() { train_two_stages({}, {kMicroBatches, kMicroBatches}); }
/// Worker 1 sends its gradient of the weight to worker 0, which returns the sum.
void train_tied_pipeline() {
  PipelineShape shape;
  shape.tied = true;
  train_two_stages(shape, {kMicroBatches + 1, kMicroBatches + 1});
}
/// Replica 1 sends its gradients to replica 0, which returns the sums.
void train_replicas() {
  PipelineShape shape;
  shape.options.replicas = 2;
  train_two_stages(shape, Counts(4, kMicroBatches + 1));
}
/// The gradients only: activations go through host memory.
void train_offloading() {
  PipelineShape shape;
  shape.options.offload = true;
  shape.options.checkpoint = pipeline::ActivationCheckpoint::kAlways;
  train_two_stages(shape, {0, kMicroBatches});
}

/// A stage that stashes its output, too.
struct StashingStageImpl : StageImpl {
  using StageImpl::StageImpl;
  at::Tensor forward(const at::Tensor& x, pipeline::Skips& skips) {
    at::Tensor y = StageImpl::forward(x);
    skips.stash("kept", y);
    return y;
  }
};
TORCH_MODULE(StashingStage);

/// One process measures the stages of both workers. The last one, of worker 1, has no parameters, hence no device: it
/// gets its input from worker 0 on the CPU, and what a stage of worker 1 stashed where that stage left it.
void measure_function_with_skip() {
  StandInStreams::get().reset(/*polls=*/10);
  DeviceWorker self;
  if (self.worker().rank() == 0) {
    const c10::Device here = test_device(0);
    std::vector<std::string> places;
    pipeline::Layers layers;
    layers.add<Stage>(here, std::int64_t{0});
    layers.add<StashingStage>(here, std::int64_t{1}).stashes("kept");
    layers.add<Stage>(here, std::int64_t{2});
    const auto sum = [&places](const at::Tensor& x, pipeline::Skips& skips) {
      const at::Tensor kept = skips.pop("kept");
      places.push_back(x.device().str() + " " + kept.device().str());
      return x + kept.to(x.device());
    };
    layers.add_function("sum", sum).pops("kept");
    pipeline::PipelineOptions options;
    options.balance = {1, 1, 1, 1};
    options.workers = {"worker0", "worker1", "worker0", "worker1"};
    options.checkpoint = pipeline::ActivationCheckpoint::kNever;
    pipeline::CostSample sample;
    sample.input = pipeline::BatchOf<at::Tensor>::from(numbers(8, 100).to(here));
    sample.target = pipeline::BatchOf<at::Tensor>::from(numbers(8, 200));
    sample.loss = pipeline::loss_of(stage_loss);
    sample.repeats = 1;
    const auto costs = pipeline::measure_costs(self.worker(), layers, options, sample);
    require(costs.size() == 4, "there are four layer ranges");
    require(places.size() == 1, std::to_string(places.size()) + " forwards");
    require(places[0] == "cpu " + here.str(), "input and stashed tensor are on " + places[0]);
  }
  self.shutdown();
  require_no_race();
}

TEST(ClusterDevicePipelines, ActivationsAndGradientsGoThroughSharedMemory) {
  ProcessWorld world(2);
  world.start_all("device_pipelines.train_pipeline");
  expect_all_end_well(world);
}

TEST(ClusterDevicePipelines, GradientsOfTiedParametersGoThroughSharedMemory) {
  ProcessWorld world(2);
  world.start_all("device_pipelines.train_tied_pipeline");
  expect_all_end_well(world);
}

TEST(ClusterDevicePipelines, GradientsOfReplicasGoThroughSharedMemory) {
  ProcessWorld world(4);
  world.start_all("device_pipelines.train_replicas");
  expect_all_end_well(world);
}

TEST(ClusterDevicePipelines, ActivationsAndGradientsGoOverUcx) {
  run_over_ucx("device_pipelines.train_pipeline");
}

TEST(ClusterDevicePipelines, GradientsOfReplicasGoOverUcx) {
  run_over_ucx("device_pipelines.train_replicas", 4);
}

TEST(ClusterDevicePipelines, OnlyGradientsOfThoseThatOffloadGoThroughSharedMemory) {
  ProcessWorld world(2);
  world.start_all("device_pipelines.train_offloading");
  expect_all_end_well(world);
}

TEST(ClusterDevicePipelines, MeasuredStagesWithoutParametersGetTensorsWhereTheyDoInAStep) {
  ProcessWorld world(2);
  world.start_all("device_pipelines.measure_function_with_skip");
  expect_all_end_well(world);
}

const testing::Scenarios kScenarios("device_pipelines",
                                    {{"train_pipeline", train_pipeline},
                                     {"train_tied_pipeline", train_tied_pipeline},
                                     {"train_replicas", train_replicas},
                                     {"train_offloading", train_offloading},
                                     {"measure_function_with_skip", measure_function_with_skip}});

}  // namespace
}  // namespace torchspan::device_pipelines_test
