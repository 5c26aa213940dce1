// Gradients of tensors on devices other than the CPU, which are stand-ins for GPUs or GPUs
// (tests/support/test_device.h): they return to the devices of the tensors.
#include "tests/parity/autograd_world.h"
#include "tests/support/test_device.h"

namespace torchspan::autograd_devices {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

/// With one GPU, both devices are this one.
c10::Device first() { return test_device(0); }
c10::Device second() { return test_device_or_first(1); }
DeviceMap swapped() {
  if (first() == second()) return DeviceMap({{first(), first()}});
  return DeviceMap({{first(), second()}, {second(), first()}});
}

/// Computes on the device of its arguments.
at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) {
  if (a.device() != b.device())
    throw std::runtime_error("a on " + a.device().str() + ", b on " + b.device().str());
  return a * b;
}
at::Tensor layer_on(const c10::Device& device, std::int64_t seed) {
  const auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return at::randn({4, 4}, generator, at::kDouble).to(device).requires_grad_();
}
/// The same with the layer behind the reference, on the device on which `x` arrives.
at::Tensor forward(const RRef<at::Tensor>& layer, const at::Tensor& x) {
  return at::matmul(x, layer.local_value()).tanh();
}
at::Tensor gradient_of(Worker& worker, const RRef<at::Tensor>& layer) {
  const at::Tensor gradient = autograd::current(worker).gradient(layer.local_value());
  if (gradient.device() != layer.local_value().device())
    throw std::runtime_error("a gradient on " + gradient.device().str());
  return gradient.cpu();
}

constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<layer_on> kLayerOn{"layer_on"};
constexpr Function<forward> kForward{"forward"};
constexpr Function<gradient_of> kGradientOf{"gradient_of"};

using Maps = std::map<std::string, DeviceMap>;
/// Worker r has maps[r].
ClusterOptions world(const std::vector<Maps>& maps, int workers = 2) {
  ClusterOptions options =
      autograd_world(workers, FunctionTable().add(kMultiply, kLayerOn, kForward, kGradientOf));
  options.adjust = [maps](int rank, WorkerPlan& plan) {
    if (static_cast<std::size_t>(rank) < maps.size()) plan.service.device_maps = maps[rank];
  };
  return options;
}

class AutogradDevices : public ::testing::TestWithParam<autograd::PassMode> {
 protected:
  void SetUp() override {
    if (const auto missing = TestDevices::missing(1); !missing.empty()) GTEST_SKIP() << missing;
  }
  autograd::BackwardOptions options() const { return {.mode = GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Modes, AutogradDevices,
                         ::testing::Values(autograd::PassMode::kSmart, autograd::PassMode::kFast),
                         [](const auto& info) {
                           return info.param == autograd::PassMode::kSmart ? "Smart" : "Fast";
                         });

void expect_gradient(const Context& context, const at::Tensor& leaf, const at::Tensor& expected) {
  const at::Tensor gradient = context.gradient(leaf);
  EXPECT_EQ(gradient.device(), leaf.device());
  expect_equal(gradient.cpu(), expected);
}

// peer: dist_autograd_test.py gpu_simple
TEST_P(AutogradDevices, DeviceMapsBackwardPass) {
  const Maps maps{{"worker1", swapped()}};
  on_first(world({maps}), [&](Worker& worker) {
    for (const Way way : kWays) {
      for (const c10::Device& device : {first(), second()}) {
        Context context(worker);
        const at::Tensor a = Kind(false).make(1).detach(), b = Kind(false).make(2).detach();
        const at::Tensor t1 = a.to(device).requires_grad_(), t2 = b.to(device).requires_grad_();
        const at::Tensor product = call(way, worker, "worker1", kMultiply, t1, t2);
        EXPECT_EQ(product.device(), device);
        context.backward((product * t1).sum(), options());
        expect_gradient(context, t1, 2 * a * b);
        expect_gradient(context, t2, a * a);
      }
    }
  });
}

/// gpu_simple: a device here, and the peer's default there; gradients need no map.
// peer: dist_autograd_test.py `gpu_simple`, `gpu_to_cpu_continuation`(`_gpu_root`),
//   `device_maps_backward_pass`: same, SMART and FAST, on a stand-in device
TEST_P(AutogradDevices, GpuSimpleWithoutAMap) {
  on_first(world({}), [&](Worker& worker) {
    Context context(worker);
    const at::Tensor a = Kind(false).make(1).detach(), b = Kind(false).make(2).detach();
    const at::Tensor t1 = a.to(second()).requires_grad_(), t2 = b.to(second()).requires_grad_();
    const at::Tensor product = worker.rpc_sync("worker1", kMultiply, t1, t2);
    EXPECT_TRUE(product.is_cpu());
    context.backward((product.to(second()) + t1).sum(), options());
    expect_gradient(context, t1, b + 1);
    expect_gradient(context, t2, a);
  });
}

/// Gradients need no map, so a map cannot disturb them.
TEST_P(AutogradDevices, GradientsDoNotGoByTheMapsOfTheirSenders) {
  const Maps here{{"worker1", DeviceMap({{first(), second()}})}};
  const Maps there{{"worker0", DeviceMap({{first(), second()}})}};
  on_first(world({here, there}), [&](Worker& worker) {
    Context context(worker);
    const at::Tensor a = Kind(false).make(1).detach();
    const at::Tensor t = a.to(first()).requires_grad_();
    context.backward(worker.rpc_sync("worker1", kMultiply, t, t).sum(), options());
    expect_gradient(context, t, 2 * a);
  });
}

/// gpu_to_cpu_continuation and its _gpu_root: hops through the CPU between hops through devices.
// peer: dist_autograd_test.py gpu_simple
TEST_P(AutogradDevices, GpuToCpuContinuation) {
  const Maps maps{{"worker1", DeviceMap({{first(), first()}})}};
  on_first(world({maps}), [&](Worker& worker) {
    for (const bool root_on_device : {false, true}) {
      Context context(worker);
      const at::Tensor a = Kind(false).make(1).detach(), b = Kind(false).make(2).detach();
      const at::Tensor t1 = a.to(first()).requires_grad_(), t2 = b.clone().requires_grad_();
      const at::Tensor there = worker.rpc_sync("worker1", kMultiply, t1, t1);
      at::Tensor loss = worker.rpc_sync("worker1", kMultiply, there.cpu(), t2);
      if (root_on_device) loss = worker.rpc_sync("worker1", kMultiply, loss.to(first()), t1);
      context.backward(loss.sum(), options());
      expect_gradient(context, t1, root_on_device ? 3 * a * a * b : 2 * a * b);
      expect_gradient(context, t2, root_on_device ? a * a * a : a * a);
    }
  });
}

/// gradients_synchronizations, dist_autograd_sync_streams: layers on devices of several workers, one after
/// the other, compared with the same layers in one process.
// peer: dist_autograd_test.py gpu_simple
TEST_P(AutogradDevices, GradientsSynchronizations) {
  const DeviceMap swap = swapped();
  on_first(world({{{"worker1", swap}, {"worker2", swap}, {"worker3", swap}}}, 4), [&](Worker& worker) {
    constexpr int kLayers = 3;
    std::vector<RRef<at::Tensor>> layers;
    for (int i = 0; i < kLayers; ++i)
      layers.push_back(worker.remote(1 + i, kLayerOn, test_device_or_first((i + 1) % 2), std::int64_t{i}));
    const auto compute = [](const Tensors& leaves) {
      at::Tensor x = leaves[kLayers];
      for (int i = 0; i < kLayers; ++i) x = at::matmul(x, leaves[i]).tanh();
      return x;
    };
    Tensors leaves;
    for (int i = 0; i < kLayers; ++i) leaves.push_back(layer_on(c10::kCPU, i));
    leaves.push_back(Kind(false).make(9).detach().new_ones({2, 4}));
    const Tensors wanted = expected(Kind(false), leaves, compute);

    for (int step = 0; step < 3; ++step) {
      Context context(worker);
      const at::Tensor input = leaves[kLayers].detach().to(first()).requires_grad_();
      at::Tensor x = input;
      // Layer i is on another device than the layer before it, so the result is moved here.
      for (int i = 0; i < kLayers; ++i)
        x = worker.rpc_sync(1 + i, kForward, layers[static_cast<std::size_t>(i)],
                            x.to(test_device_or_first(i % 2)));
      context.backward(x.sum(), options());
      expect_gradient(context, input, wanted[kLayers]);
      for (int i = 0; i < kLayers; ++i) {
        expect_equal(worker.rpc_sync(1 + i, kGradientOf, layers[static_cast<std::size_t>(i)]),
                     wanted[static_cast<std::size_t>(i)]);
      }
    }
  });
}

}  // namespace
}  // namespace torchspan::autograd_devices
