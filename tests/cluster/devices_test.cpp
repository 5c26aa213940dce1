// Device maps, streams and autocast over real processes: layers on devices of two workers train as in one
// process, and the devices see no access that nothing orders.
#include <algorithm>
#include <cmath>

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <torchspan/detail/device/autocast.h>
#include <torchspan/detail/device/streams.h>
#include <torchspan/pipeline.h>
#include <torchspan/torchspan.h>

#include "tests/support/cluster_main.h"
#include "tests/support/test_device.h"

namespace torchspan::devices_test {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int kSteps = 5;

at::Tensor start_of(std::int64_t layer) {
  const auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(7 + layer));
  return at::randn({4, 4}, generator, at::kDouble);
}
at::Tensor layer_on(const c10::Device& device, std::int64_t layer) {
  return start_of(layer).to(device).requires_grad_();
}
at::Tensor forward(const RRef<at::Tensor>& layer, const at::Tensor& x) {
  return at::matmul(x, layer.local_value()).tanh();
}
at::Tensor values(const RRef<at::Tensor>& layer) { return layer.local_value().detach(); }

constexpr Function<layer_on> kLayerOn{"layer_on"};
constexpr Function<forward> kForward{"forward"};
constexpr Function<values> kValues{"values"};

at::Tensor batch(int step) { return start_of(100 + step).narrow(0, 0, 2); }

/// The layers after the same number of steps in one process.
std::vector<at::Tensor> trained_alone() {
  std::vector<at::Tensor> layers;
  for (int i = 0; i < 2; ++i) layers.push_back(layer_on(c10::kCPU, i));
  torch::optim::SGD optimizer(layers, torch::optim::SGDOptions(0.1));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    at::matmul(at::matmul(batch(step), layers[0]).tanh(), layers[1]).tanh().pow(2).sum().backward();
    optimizer.step();
  }
  return layers;
}

/// Ends the process if its devices saw a race.
void require_order() {
  const std::vector<std::string> races = StandInStreams::get().take_races();
  require(races.empty(), std::to_string(races.size()) + " races: " + (races.empty() ? "" : races.front()));
}

void train() {
  StandInStreams::get().reset(/*polls=*/10);  // copies take a while
  WorkerOptions options = WorkerOptions::from_env();
  if (options.environment.rank == 0) {
    options.device_maps["worker1"] = {{test_device(0), test_device(1)}};
    options.device_maps["worker2"] = {{test_device(0), test_device(0)}, {test_device(1), test_device(1)}};
  }
  Session session(options, FunctionTable().add(kLayerOn, kForward, kValues));
  Worker& worker = session.worker();
  if (session.rank() == 0) {
    const c10::StreamGuard side(device::stream_from_pool(test_device(0)));
    const std::vector<RRef<at::Tensor>> layers{worker.remote("worker1", kLayerOn, test_device(1), 0),
                                               worker.remote("worker2", kLayerOn, test_device(0), 1)};
    optim::DistributedOptimizer optimizer(worker, optim::SGD{.lr = 0.1}, {layers[0], layers[1]});
    for (int step = 0; step < kSteps; ++step) {
      autograd::Context context(session);
      const at::Tensor hidden =
          worker.rpc_sync("worker1", kForward, layers[0], batch(step).to(test_device(0)));
      require(hidden.device() == test_device(0), "the result is on " + hidden.device().str());
      const at::Tensor y = worker.rpc_sync("worker2", kForward, layers[1], hidden);
      context.backward(y.pow(2).sum());
      optimizer.step(context);
    }
    const std::vector<at::Tensor> expected = trained_alone();
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const at::Tensor got = worker.rpc_sync(layers[i].owner().name, kValues, layers[i]);
      require(got.device() == test_device(0), "the layer came to " + got.device().str());
      require(at::allclose(got.cpu(), expected[i], 1e-12, 1e-12), "layer " + std::to_string(i) + " differs");
    }
  }
  session.shutdown();
  require_order();
}

/// A stage of a pipeline; it does not move its input.
struct StageImpl : torch::nn::Module {
  StageImpl(c10::Device device, std::int64_t layer)
      : weight(register_parameter("weight", start_of(layer).to(device))) {}
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight).tanh(); }
  at::Tensor weight;
};
TORCH_MODULE(Stage);

at::Tensor pipeline_loss(const at::Tensor& output, const at::Tensor& target) {
  return (output - target.to(output.device())).pow(2).mean();
}

/// The gradients of the stages after two batches of 4 rows in one process.
std::vector<at::Tensor> stage_gradients_alone() {
  std::vector<at::Tensor> stages{layer_on(c10::kCPU, 0), layer_on(c10::kCPU, 1), layer_on(c10::kCPU, 2)};
  for (int step = 0; step < 2; ++step) {
    at::Tensor x = start_of(100 + step);
    for (const at::Tensor& stage : stages) x = at::matmul(x, stage).tanh();
    pipeline_loss(x, start_of(200 + step)).backward();
  }
  return {stages[0].grad(), stages[1].grad(), stages[2].grad()};
}

/// Three stages: two on a device of worker 0, one on another device, of worker 1.
void train_pipeline(const pipeline::PipelineOptions& options, Session& session) {
  const c10::Device here = test_device(static_cast<int>(session.rank()) % test_device_count());
  pipeline::Layers layers;
  for (std::int64_t layer = 0; layer < 3; ++layer) layers.add<Stage>(here, layer);
  pipeline::Pipeline pipe(session.worker(), layers, options);
  for (int step = 0; step < 2; ++step) {
    pipe.train_step(start_of(100 + step).to(here), start_of(200 + step), pipeline_loss);
  }
  const std::vector<at::Tensor> expected = stage_gradients_alone();
  for (int layer = 0; layer < 3; ++layer) {
    const auto stage = pipe.module(layer);
    if (!stage) continue;
    const at::Tensor gradient = stage->parameters()[0].grad();
    require(gradient.device() == here, "the gradient is on " + gradient.device().str());
    require(at::allclose(gradient.cpu(), expected[static_cast<std::size_t>(layer)], 1e-12, 1e-12),
            "the gradient of stage " + std::to_string(layer) + " differs");
  }
}

void train_pipelines() {
  StandInStreams::get().reset(/*polls=*/10);
  Session session(WorkerOptions::from_env());
  using pipeline::ActivationCheckpoint;
  using pipeline::Schedule;
  for (const auto checkpoint : {ActivationCheckpoint::kNever, ActivationCheckpoint::kAlways}) {
    for (const auto schedule : {Schedule::k1F1B, Schedule::kArrival, Schedule::kZBH1}) {
      pipeline::PipelineOptions options;
      options.balance = {2, 1};
      options.micro_batches = 4;
      options.checkpoint = checkpoint;
      options.schedule = schedule;
      train_pipeline(options, session);
      if (checkpoint == ActivationCheckpoint::kNever) continue;
      options.checkpoint_layers = {1};
      train_pipeline(options, session);
    }
  }
  session.shutdown();
  require_order();
}

/// Trains one batch of four micro-batches under 1F1B: each forward of the last stage is followed by its backward. The
/// host waits for no device between them, and once for the norms of all gradients.
void read_losses_and_norms_once() {
  StandInStreams::get().reset(/*polls=*/10);
  Session session(WorkerOptions::from_env());
  const c10::Device here = test_device(static_cast<int>(session.rank()) % test_device_count());
  pipeline::Layers layers;
  for (std::int64_t layer = 0; layer < 3; ++layer) layers.add<Stage>(here, layer);
  pipeline::PipelineOptions options;
  options.balance = {2, 1};
  options.micro_batches = 4;
  options.checkpoint = pipeline::ActivationCheckpoint::kNever;
  options.schedule = pipeline::Schedule::k1F1B;
  pipeline::Pipeline pipe(session.worker(), layers, options);
  std::size_t at_loss = 0, waits = 0;
  int backwards = 0;
  const auto loss = [&](const at::Tensor& output, const at::Tensor& target) {
    const at::Tensor value = pipeline_loss(output, target);
    output.register_hook([&](const at::Tensor&) {
      ++backwards;
      waits += StandInStreams::get().host_waits() - at_loss;
    });
    at_loss = StandInStreams::get().host_waits();
    return value;
  };
  const double got = pipe.train_step(start_of(100).to(here), start_of(200), loss);
  at::Tensor x = start_of(100);
  for (std::int64_t layer = 0; layer < 3; ++layer) x = at::matmul(x, start_of(layer)).tanh();
  const double wanted = pipeline_loss(x, start_of(200)).item<double>();
  require(std::abs(got - wanted) < 1e-12, "the loss is " + std::to_string(got));
  require(backwards == (session.rank() == 1 ? 4 : 0), std::to_string(backwards) + " backwards");
  require(waits == 0, "the host waited " + std::to_string(waits) + " times before the backwards");
  const std::size_t before = StandInStreams::get().host_waits();
  pipe.clip_grad_norm(1e9);
  require(StandInStreams::get().host_waits() <= before + 1, "the host waited for each gradient's norm");
  session.shutdown();
  require_order();
}

/// Inputs of a stage that are in the memory of its device.
class AliveInputs {
 public:
  void add(const at::Tensor& x) { memory_.push_back(x.storage().getWeakStorageImpl()); }
  int count() const {
    return static_cast<int>(
        std::count_if(memory_.begin(), memory_.end(), [](const auto& each) { return each.use_count() > 0; }));
  }

 private:
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory_;
};

/// A stage that counts the inputs that are alive when a forward begins, and fails in one of them.
struct CountingStageImpl : torch::nn::Module {
  CountingStageImpl(c10::Device device, std::int64_t layer, AliveInputs* inputs, int* most,
                    int* forwards_left)
      : alive(inputs),
        most_alive(most),
        left(forwards_left),
        weight(register_parameter("weight", start_of(layer).to(device))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (--*left == 0) throw std::runtime_error("the stage fails");
    if (!torch::GradMode::is_enabled()) {
      alive->add(x);
      *most_alive = std::max(*most_alive, alive->count());
    }
    return at::matmul(x, weight).tanh();
  }
  AliveInputs* alive;
  int* most_alive;
  int* left;
  at::Tensor weight;
};
TORCH_MODULE(CountingStage);

/// 16 rows, so that there are 8 micro-batches.
at::Tensor rows_of(std::int64_t seed) {
  return at::cat({start_of(seed), start_of(seed + 1), start_of(seed + 2), start_of(seed + 3)});
}

/// Two stages of one layer range each on two workers, and one more on the second. Under GPipe all forwards run before
/// the first backward.
void offload_in_pipeline(Session& session, pipeline::PipelineOptions options) {
  const c10::Device here = test_device(static_cast<int>(session.rank()) % test_device_count());
  AliveInputs inputs;
  int most = 0, left = -1;
  pipeline::Layers layers;
  for (std::int64_t layer = 0; layer < 3; ++layer)
    layers.add<CountingStage>(here, layer, &inputs, &most, &left);
  options.workers = {"worker0", "worker1", "worker1"};
  options.balance = {1, 1, 1};
  options.micro_batches = 8;
  options.checkpoint = pipeline::ActivationCheckpoint::kAlways;
  pipeline::Pipeline pipe(session.worker(), layers, options);
  std::vector<at::Tensor> plain{layer_on(c10::kCPU, 0), layer_on(c10::kCPU, 1), layer_on(c10::kCPU, 2)};
  const auto compare = [&](const char* when) {
    for (int layer = 0; layer < 3; ++layer) {
      const auto stage = pipe.module(layer);
      if (!stage) continue;
      require(at::allclose(stage->parameters()[0].grad().cpu(), plain[static_cast<std::size_t>(layer)].grad(),
                           1e-12, 1e-12),
              std::string("the gradient of stage ") + std::to_string(layer) + " differs " + when);
    }
  };
  const auto step = [&](std::int64_t seed) {
    pipe.train_step(rows_of(seed).to(here), rows_of(seed + 50), pipeline_loss);
  };
  const auto step_alone = [&](std::int64_t seed) {
    at::Tensor x = rows_of(seed);
    for (const at::Tensor& weight : plain) x = at::matmul(x, weight).tanh();
    pipeline_loss(x, rows_of(seed + 50)).backward();
  };
  step(100);
  step_alone(100);
  compare("after a step");
  if (options.schedule == pipeline::Schedule::kGPipe && session.rank() == 1) {
    // Two layer ranges: each may hold the input of a running forward and two whose copies go on; without offload 16.
    require(options.offload ? most <= 6 : most >= 15, "the device held " + std::to_string(most) + " inputs");
  }
  // A failure between forwards and backwards drops what was offloaded; the next step is as before.
  left = session.rank() == 1 ? 21 : -1;
  bool failed = false;
  try {
    step(200);
  } catch (const Error&) {
    failed = true;
  }
  require(failed, "the step succeeded although a stage failed");
  left = -1;
  for (const at::Tensor& parameter : pipe.parameters()) parameter.mutable_grad() = at::Tensor();
  for (at::Tensor& parameter : plain) parameter.mutable_grad() = at::Tensor();
  step(300);
  step_alone(300);
  compare("after a failed step");
}

void offload_activations() {
  StandInStreams::get().reset(/*polls=*/10);
  Session session(WorkerOptions::from_env());
  using pipeline::Schedule;
  for (const bool offload : {true, false}) {
    for (const auto schedule : {Schedule::kGPipe, Schedule::k1F1B, Schedule::kArrival}) {
      pipeline::PipelineOptions options;
      options.schedule = schedule;
      options.offload = offload;
      offload_in_pipeline(session, options);
    }
  }
  session.shutdown();
  require_order();
}

/// A stage whose worker may have others on another device.
struct MovingStageImpl : StageImpl {
  using StageImpl::StageImpl;
  at::Tensor forward(const at::Tensor& x) { return StageImpl::forward(x.to(weight.device())); }
};
TORCH_MODULE(MovingStage);

/// A pipeline of three layers, two of them on worker 0 of each replica.
struct SharedWeights {
  std::vector<std::size_t> weight_of;  ///< by layer; layers with the same weight are tied
  int replicas = 1;
  bool apart = false;  ///< layer 1 is on another device of its worker
};

at::Tensor input_of(int step, int replica) { return start_of(100 + step + 10 * replica); }
at::Tensor target_of(int step, int replica) { return start_of(200 + step + 10 * replica); }

/// The gradients of the layers after two batches in one process.
std::vector<at::Tensor> shared_gradients_alone(const SharedWeights& shape) {
  std::vector<at::Tensor> weights, gradients, inputs, targets;
  for (std::int64_t layer = 0; layer < 3; ++layer) weights.push_back(layer_on(c10::kCPU, layer));
  for (int step = 0; step < 2; ++step) {
    for (int replica = 0; replica < shape.replicas; ++replica) {
      at::Tensor x = input_of(step, replica);
      for (const std::size_t weight : shape.weight_of) x = at::matmul(x, weights[weight]).tanh();
      (pipeline_loss(x, target_of(step, replica)) / shape.replicas).backward();
    }
  }
  for (const std::size_t weight : shape.weight_of) gradients.push_back(weights[weight].grad());
  return gradients;
}

void train_shared(const SharedWeights& shape, const pipeline::PipelineOptions& options, Session& session) {
  const auto device_of = [&](bool other) {
    return test_device((static_cast<int>(session.rank()) + (other ? 1 : 0)) % test_device_count());
  };
  pipeline::Layers layers;
  std::vector<std::vector<pipeline::TiedParameter>> ties(3);
  for (std::size_t layer = 0; layer < 3; ++layer) {
    const c10::Device device = device_of(shape.apart && layer == 1);
    const auto number = static_cast<std::int64_t>(layer);
    auto& tie = ties[shape.weight_of[layer]];
    if (shape.apart) {
      tie.emplace_back(layers.add<MovingStage>(device, number), "weight");
    } else {
      tie.emplace_back(layers.add<Stage>(device, number), "weight");
    }
  }
  for (const auto& tie : ties) {
    if (tie.size() > 1) layers.tie(tie);
  }
  pipeline::Pipeline pipe(session.worker(), layers, options);
  for (int step = 0; step < 2; ++step) {
    pipe.train_step(input_of(step, pipe.replica()).to(device_of(false)), target_of(step, pipe.replica()),
                    pipeline_loss);
  }
  const std::vector<at::Tensor> expected = shared_gradients_alone(shape);
  for (std::size_t layer = 0; layer < 3; ++layer) {
    const auto stage = pipe.module(static_cast<int>(layer));
    if (!stage) continue;
    const at::Tensor gradient = stage->parameters()[0].grad();
    require(gradient.device() == device_of(shape.apart && layer == 1),
            "the gradient is on " + gradient.device().str());
    require(at::allclose(gradient.cpu(), expected[layer], 1e-12, 1e-12),
            "the gradient of layer " + std::to_string(layer) + " differs");
  }
}

void train_all_shared(const std::vector<SharedWeights>& shapes) {
  StandInStreams::get().reset(/*polls=*/10);
  Session session(WorkerOptions::from_env());
  using pipeline::ActivationCheckpoint;
  using pipeline::Schedule;
  for (const SharedWeights& shape : shapes) {
    for (const auto schedule : {Schedule::k1F1B, Schedule::kZBH1}) {
      pipeline::PipelineOptions options;
      options.balance = {2, 1};
      options.micro_batches = 4;
      options.replicas = shape.replicas;
      options.checkpoint =
          schedule == Schedule::kZBH1 ? ActivationCheckpoint::kNever : ActivationCheckpoint::kAlways;
      options.schedule = schedule;
      train_shared(shape, options, session);
    }
  }
  session.shutdown();
  require_order();
}

void train_tied() { train_all_shared({{{0, 1, 0}}, {{0, 0, 0}, 1, true}, {{0, 0, 2}, 1, true}}); }
void train_replicas() { train_all_shared({{{0, 1, 2}, 2}, {{0, 1, 0}, 2}}); }

void compute_under_autocast() {
  Session session(WorkerOptions::from_env(), FunctionTable().add(kForward));
  if (session.rank() == 0) {
    const at::Tensor x = start_of(1).to(at::kFloat), y = start_of(2).to(at::kFloat);
    for (const bool enabled : {true, false}) {
      device::AutocastScope scope;
      if (enabled) scope.enter({{{c10::DeviceType::CPU, at::kBFloat16}}, true});
      const at::Tensor local = at::matmul(x, y);
      require((local.scalar_type() == at::kBFloat16) == enabled, "autocast works here");
      const at::Tensor remote = session.worker().rpc_sync(1, "aten::matmul", {x, y}).toTensor();
      require(remote.scalar_type() == local.scalar_type() && at::equal(remote, local),
              "the results are equal");
    }
  }
  session.shutdown();
}

TEST(ClusterDevices, AHandlerComputesUnderTheAutocastOfItsCaller) {
  ProcessWorld world(2);
  world.start_all("devices.compute_under_autocast");
  expect_all_end_well(world);
}

TEST(ClusterDevices, ThreeProcessesWithDevicesTrainAsOneWithout) {
  if (test_device_count() < 2) GTEST_SKIP() << "it needs two devices";
  ProcessWorld world(3);
  world.start_all("devices.train");
  expect_all_end_well(world);
}

TEST(ClusterDevices, PipelinesWithStagesOnDevicesComputeTheGradientsOfOneProcess) {
  ProcessWorld world(2);
  world.start_all("devices.train_pipelines");
  expect_all_end_well(world);
}

TEST(ClusterDevices, PipelinesReadLossesAndNormsOfGradientsOnce) {
  ProcessWorld world(2);
  world.start_all("devices.read_losses_and_norms_once");
  expect_all_end_well(world);
}

TEST(ClusterDevices, OffloadedActivationsLeaveTheDevicesAndComeBack) {
  ProcessWorld world(2);
  world.start_all("devices.offload_activations");
  expect_all_end_well(world);
}

TEST(ClusterDevices, TiedParametersOnDevicesHaveTheGradientsOfOneProcess) {
  ProcessWorld world(2);
  world.start_all("devices.train_tied");
  expect_all_end_well(world);
}

TEST(ClusterDevices, ReplicasOnDevicesHaveTheGradientsOfOneProcess) {
  ProcessWorld world(4);
  world.start_all("devices.train_replicas");
  expect_all_end_well(world);
}

TEST(ClusterDevices, ASessionRefusesAMapOfADeviceThatItLacks) {
  WorkerOptions options;
  options.device_maps["worker1"] = {{stand_in(4), stand_in(0)}};
  try {
    Session session(options);
    ADD_FAILURE() << "it started";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("privateuseone:4"));
  }
}

const testing::Scenarios kScenarios("devices", {{"train", train},
                                                {"train_pipelines", train_pipelines},
                                                {"read_losses_and_norms_once", read_losses_and_norms_once},
                                                {"offload_activations", offload_activations},
                                                {"train_tied", train_tied},
                                                {"train_replicas", train_replicas},
                                                {"compute_under_autocast", compute_under_autocast}});

}  // namespace
}  // namespace torchspan::devices_test
