// Training over workers with devices whose streams report every access that nothing orders, or on GPUs: forward,
// backward, optimizer step and next forward, on the streams of the caller and of handlers.
#include <c10/core/StreamGuard.h>

#include <torchspan/detail/device/streams.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/optim/grad_scaler.h>

#include "tests/parity/autograd_world.h"
#include "tests/support/test_device.h"

namespace torchspan::autograd_streams {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using optim::DistributedOptimizer;
using optim::SGD;
using optim::Target;
using ::testing::IsEmpty;

constexpr std::int64_t kWidth = 96;  // a layer has more bytes than are copied directly

/// Another stream than the default one, which is busy.
c10::Stream side_stream(c10::Device device = test_device(0)) {
  const c10::Stream stream = device::stream_from_pool(device);
  keep_busy(stream);
  return stream;
}
void order(const c10::Stream& earlier, const c10::Stream& later) {
  device::EventPool events;
  device::order_after(later, earlier, events);
}

at::Tensor weights(std::int64_t seed) {
  const auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return at::randn({kWidth, kWidth}, generator, at::kDouble).mul_(0.1);
}
/// All workers are in this process, and their default streams are the same: worker 0 has another device, if there are two.
c10::Device device_of(int rank) { return test_device_or_first(rank == 0 ? 0 : 1); }
at::Tensor layer(Worker& worker, std::int64_t seed) {
  return weights(seed).to(device_of(worker.rank())).requires_grad_();
}
at::Tensor compute(const at::Tensor& x, const at::Tensor& weight) { return at::matmul(x, weight).tanh(); }

/// Applies the layer on another stream than the handler's.
at::Tensor forward(const RRef<at::Tensor>& layer, const at::Tensor& x) {
  const c10::Stream here = device::current_stream(x.device()), side = side_stream(x.device());
  const at::Tensor& weight = layer.local_value();
  order(here, side);
  device::keep_memory_for(x, side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = compute(x, weight);
  }
  order(side, here);
  device::keep_memory_for(y, here);
  return y;
}
at::Tensor values(const RRef<at::Tensor>& layer) { return layer.local_value().detach().cpu(); }
at::Tensor gradient_of(Worker& worker, const RRef<at::Tensor>& layer) {
  return autograd::current(worker).gradient(layer.local_value()) * 2;
}

constexpr Function<layer> kLayer{"layer"};
constexpr Function<forward> kForward{"forward"};
constexpr Function<values> kValues{"values"};
constexpr Function<gradient_of> kGradientOf{"gradient_of"};

ClusterOptions world(int workers) {
  ClusterOptions options = world_of(workers, FunctionTable().add(kLayer, kForward, kValues, kGradientOf));
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<AutogradExtension>());
    extensions.push_back(std::make_unique<optim::OptimExtension>());
    return extensions;
  };
  options.adjust = [workers](int rank, WorkerPlan& plan) {
    for (int other = 0; other < workers; ++other) {
      if (other != rank)
        plan.service.device_maps[SimCluster::name(other)] = DeviceMap({{device_of(rank), device_of(other)}});
    }
  };
  return options;
}

struct Training {
  autograd::PassMode mode = autograd::PassMode::kSmart;
  unsigned threads = 1;
  bool in_backward = false;
  bool side = true;  ///< the caller works on another stream than the default one
};

/// The weights after `steps` steps of SGD in one process on the CPU: two remote layers, and one here.
Tensors trained_alone(int steps) {
  Tensors layers{weights(1), weights(2), weights(3)};
  for (int step = 0; step < steps; ++step) {
    for (at::Tensor& one : layers) one = one.detach().requires_grad_();
    at::Tensor x = weights(10 + step);
    for (const at::Tensor& one : layers) x = compute(x, one);
    (x * x).sum().backward();
    for (at::Tensor& one : layers) one = one.detach() - 0.1 * one.grad();
  }
  return layers;
}

class AutogradStreams : public ::testing::TestWithParam<Training> {
 protected:
  void SetUp() override { TestDevices::reset(/*polls=*/2); }
  void TearDown() override {
    EXPECT_THAT(TestDevices::take_races(), IsEmpty());
    TestDevices::reset();
  }
  autograd::BackwardOptions options() const {
    return {.mode = GetParam().mode, .threads = GetParam().threads};
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, AutogradStreams,
                         ::testing::Values(Training{}, Training{.mode = autograd::PassMode::kFast},
                                           Training{.threads = 3}, Training{.in_backward = true},
                                           Training{.side = false}),
                         [](const auto& info) {
                           const Training& training = info.param;
                           return std::string(training.mode == autograd::PassMode::kFast ? "Fast" : "Smart") +
                                  (training.threads > 1 ? "Threads" : "") +
                                  (training.in_backward ? "InBackward" : "") +
                                  (training.side ? "OnASideStream" : "");
                         });

// peer: dist_autograd_test.py dist_autograd_sync_streams, gradients_synchronizations: same, over stand-in devices
//   that report races; also orders a step and the next forward, which pytorch#57960 asks for
TEST_P(AutogradStreams, TrainingIsOrderedFromStepToStep) {
  constexpr int kSteps = 3;
  const Tensors wanted = trained_alone(kSteps);
  on_first(world(3), [&](Worker& worker) {
    std::vector<RRef<at::Tensor>> layers{worker.remote(1, kLayer, std::int64_t{1}),
                                         worker.remote(2, kLayer, std::int64_t{2})};
    const at::Tensor head = layer(worker, 3);
    DistributedOptimizer optimizer(worker, SGD{.lr = 0.1}, {layers[0], layers[1], Target(head)});
    const c10::Stream side = side_stream();
    std::optional<c10::StreamGuard> guard;
    if (GetParam().side) guard.emplace(side);
    for (int step = 0; step < kSteps; ++step) {
      Context context(worker);
      if (GetParam().in_backward) optimizer.step_in_backward(context);
      at::Tensor x = weights(10 + step).to(test_device(0));
      for (const auto& one : layers) x = worker.rpc_sync(one.owner().rank, kForward, one, x);
      x = compute(x, head);
      context.backward((x * x).sum(), options());
      if (!GetParam().in_backward) optimizer.step(context);
    }
    expect_equal(head.detach().cpu(), wanted[2]);  // before calls, which would order more
    for (std::size_t i = 0; i < layers.size(); ++i)
      expect_equal(worker.rpc_sync(layers[i].owner().rank, kValues, layers[i]), wanted[i]);
  });
}

TEST_P(AutogradStreams, GradientsAreReadyForWhoeverReadsThem) {
  on_first(world(2), [&](Worker& worker) {
    const RRef<at::Tensor> remote = worker.remote(1, kLayer, std::int64_t{1});
    const at::Tensor head = layer(worker, 3);
    Context context(worker);
    {
      const c10::StreamGuard guard(side_stream());
      const at::Tensor x = worker.rpc_sync(1, kForward, remote, weights(10).to(test_device(0)));
      context.backward(compute(x, head).sum(), options());
    }
    const c10::StreamGuard guard(side_stream());
    const at::Tensor here = context.gradient(head) * 2, there = worker.rpc_sync(1, kGradientOf, remote);
    EXPECT_EQ(context.gradients().size(), 1);
    at::Tensor w = weights(1).requires_grad_(), h = weights(3).requires_grad_();
    compute(compute(weights(10), w), h).sum().backward();
    expect_equal(here.cpu(), h.grad() * 2);
    expect_equal(there.cpu(), w.grad() * 2);
  });
}

/// The norms of all gradients are read together, those of both devices on one of them.
TEST(GradientsOnDevices, AreWaitedForOnceByNormsAndChecks) {
  if (const auto missing = TestDevices::missing(2, /*needs_stand_ins=*/true); !missing.empty())
    GTEST_SKIP() << missing;
  StandInStreams& streams = StandInStreams::get();
  Tensors there, here;
  for (int i = 0; i < 6; ++i) {
    there.push_back(weights(i).to(test_device(i % 2)).requires_grad_());
    there.back().mutable_grad() = weights(10 + i).to(test_device(i % 2));
    here.push_back(weights(i).requires_grad_());
    here.back().mutable_grad() = weights(10 + i);
  }
  streams.reset();
  EXPECT_EQ(optim::clip_grad_norm(there, 0.5), optim::clip_grad_norm(here, 0.5));
  EXPECT_EQ(streams.host_waits(), 1u);

  optim::Optimizer optimizer(there, SGD{.lr = 0.1});
  optim::GradScaler scaler;
  streams.reset();
  scaler.unscale_(optimizer);
  EXPECT_EQ(streams.host_waits(), 1u);
  for (std::size_t i = 0; i < there.size(); ++i)
    expect_equal(there[i].grad().cpu() * scaler.get_scale(), here[i].grad());
  EXPECT_THAT(streams.take_races(), IsEmpty());
  streams.reset();
}

}  // namespace
}  // namespace torchspan::autograd_streams
