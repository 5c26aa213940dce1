// Gradients that go back from device to device through memory that both workers map, over the stand-in devices. In this
// memory, copies run late (rpc_device_memory.cpp says what this finds).
#include "tests/parity/autograd_world.h"
#include "tests/support/stand_in_device.h"
#include "tests/support/stand_in_runtime.h"

namespace torchspan::autograd_device_memory {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::IsEmpty;

constexpr std::int64_t kLarge = 1 << 15;  // doubles: 256 KiB

at::Tensor square(const at::Tensor& x) { return x * x; }
std::int64_t counter(Worker& worker, const std::string& name) {
  return static_cast<std::int64_t>(worker.runtime().metrics.snapshot()[name]);
}
/// How many tensors this worker has sent through device memory.
std::int64_t sent(Worker& worker) { return counter(worker, "rpc.device_memory.sent"); }
at::Tensor fail_in_backward(const at::Tensor& x) {
  at::Tensor y = x * x;
  y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("as asked"); });
  return y;
}

constexpr Function<square> kSquare{"square"};
constexpr Function<sent> kSent{"sent"};
constexpr Function<fail_in_backward> kFailInBackward{"fail_in_backward"};

using Maps = std::map<std::string, DeviceMap>;
DeviceMap first_to_second() { return DeviceMap({{stand_in(0), stand_in(1)}}); }

/// Worker r has maps[r]. `bytes`: of the shared memory.
ClusterOptions world(const std::vector<Maps>& maps, std::size_t bytes = 16 << 20) {
  ClusterOptions options = autograd_world(2, FunctionTable().add(kSquare, kSent, kFailInBackward));
  options.service.device_runtime = std::make_shared<StandInRuntime>();
  options.service.device_staging_bytes = bytes;
  options.adjust = [maps](int rank, WorkerPlan& plan) {
    if (static_cast<std::size_t>(rank) < maps.size()) plan.service.device_maps = maps[rank];
  };
  return options;
}
ClusterOptions world() { return world({{{"worker1", first_to_second()}}}); }

class AutogradDeviceMemory : public ::testing::TestWithParam<autograd::PassMode> {
 protected:
  void SetUp() override { device_.reset(/*polls=*/3); }
  void TearDown() override {
    EXPECT_THAT(device_.take_races(), IsEmpty());
    device_.reset();
  }
  autograd::BackwardOptions options() const { return {.mode = GetParam()}; }
  static at::Tensor leaf(double value, std::int64_t elements = kLarge) {
    return at::full({elements}, value, at::kDouble).to(stand_in(0)).requires_grad_();
  }
  static void expect_all(const at::Tensor& tensor, double value) {
    EXPECT_EQ(tensor.device(), stand_in(0));
    EXPECT_TRUE(at::equal(tensor.cpu(), at::full(tensor.sizes(), value, at::kDouble))) << tensor.cpu()[0];
  }
  /// Calls until arguments and results go through device memory.
  static void connect(Worker& worker) {
    for (int i = 0; i < 1000; ++i) {
      worker.rpc_sync(1, kSquare, leaf(i).detach());
      if (sent(worker) > 0 && worker.rpc_sync(1, kSent) > 0) return;
      nap(worker, milliseconds(1));
    }
    ADD_FAILURE() << "all tensors went through host memory";
  }
  /// Squares x on a worker, squares the result here, and compares the gradient of the sum with that of x^4.
  void differentiate(Worker& worker, int to, double x, std::int64_t elements = kLarge) const {
    const at::Tensor start = leaf(x, elements);
    Context context(worker);
    const at::Tensor y = worker.rpc_sync(to, kSquare, start);
    context.backward((y * y).sum(), options());
    expect_all(context.gradient(start), 4 * x * x * x);
  }
  StandInStreams& device_ = StandInStreams::get();
};
INSTANTIATE_TEST_SUITE_P(Modes, AutogradDeviceMemory,
                         ::testing::Values(autograd::PassMode::kSmart, autograd::PassMode::kFast),
                         [](const auto& info) {
                           return info.param == autograd::PassMode::kSmart ? "Smart" : "Fast";
                         });

TEST_P(AutogradDeviceMemory, GradientsOfArgumentsAndOfResultsGoThroughIt) {
  on_first(world(), [&](Worker& worker) {
    connect(worker);
    for (int i = 1; i <= 3; ++i) {
      const std::int64_t here = sent(worker), there = worker.rpc_sync(1, kSent);
      differentiate(worker, 1, i);
      EXPECT_EQ(sent(worker) - here, 2);                // the argument, and the gradient of the result
      EXPECT_EQ(worker.rpc_sync(1, kSent) - there, 2);  // the result, and the gradient of the argument
    }
  });
}

/// Tensors and gradients of 1 MiB, in parts of a quarter of the memory.
TEST_P(AutogradDeviceMemory, LargeGradientsGoThroughItInParts) {
  on_first(world({{{"worker1", first_to_second()}}}, std::size_t{512} << 10), [&](Worker& worker) {
    connect(worker);
    for (int i = 1; i <= 3; ++i) {
      const std::int64_t here = sent(worker), there = worker.rpc_sync(1, kSent);
      differentiate(worker, 1, i, 1 << 17);
      EXPECT_EQ(sent(worker) - here, 2 * 8);
      EXPECT_EQ(worker.rpc_sync(1, kSent) - there, 2 * 8);
    }
  });
}

/// The caller's device map places tensors and gradients, whatever the map of the other worker says of these devices.
TEST_P(AutogradDeviceMemory, TheMapOfTheCallerPlacesGradients) {
  const Maps here{{"worker1", first_to_second()}};
  const Maps there{{"worker0", DeviceMap({{stand_in(1), stand_in(1)}, {stand_in(0), stand_in(0)}})}};
  on_first(world({here, there}), [&](Worker& worker) {
    connect(worker);
    const std::int64_t before = worker.rpc_sync(1, kSent);
    differentiate(worker, 1, 3);
    EXPECT_EQ(worker.rpc_sync(1, kSent) - before, 2);
  });
}

TEST_P(AutogradDeviceMemory, GradientsThatFindNoRoomGoThroughHostMemory) {
  on_first(world({{{"worker1", first_to_second()}}}, 300 << 10), [&](Worker& worker) {
    connect(worker);
    Context context(worker);
    std::vector<at::Tensor> starts;
    at::Tensor loss;
    for (int i = 1; i <= 5; ++i) {
      starts.push_back(leaf(i));
      const at::Tensor y = worker.rpc_sync(1, kSquare, starts.back()).sum();
      loss = loss.defined() ? loss + y : y;
    }
    context.backward(loss, options());
    for (int i = 1; i <= 5; ++i)
      expect_all(context.gradient(starts[static_cast<std::size_t>(i - 1)]), 2.0 * i);
  });
}

TEST_P(AutogradDeviceMemory, WithoutADeviceMapGradientsGoThroughHostMemory) {
  on_first(world({}), [&](Worker& worker) {
    for (int i = 1; i <= 3; ++i) {
      const at::Tensor start = leaf(i);
      Context context(worker);
      const at::Tensor y = worker.rpc_sync(1, kSquare, start).to(stand_in(0));
      context.backward((y * y).sum(), options());
      expect_all(context.gradient(start), 4.0 * i * i * i);
      nap(worker, milliseconds(10));
    }
    EXPECT_EQ(sent(worker) + worker.rpc_sync(1, kSent), 0);
  });
}

TEST_P(AutogradDeviceMemory, APassThatFailsReturnsItsMemory) {
  on_first(world({{{"worker1", first_to_second()}}}, 600 << 10), [&](Worker& worker) {
    connect(worker);
    for (int i = 0; i < 5; ++i) {
      nap(worker, seconds(1));
      const std::int64_t before = sent(worker);
      Context context(worker);
      const at::Tensor y = worker.rpc_sync(1, kFailInBackward, leaf(1));
      expect_error(ErrorKind::kRemoteFailure, "as asked", [&] { context.backward(y.sum(), options()); });
      EXPECT_EQ(sent(worker) - before,
                2);  // there is room for both if the memory of the last pass was returned
    }
    nap(worker, seconds(1));
    differentiate(worker, 1, 2);
  });
}

TEST_P(AutogradDeviceMemory, GradientsOfAWorkersCallsToItselfStayOnTheDevice) {
  on_first(world(), [&](Worker& worker) {
    const std::int64_t before = counter(worker, "rpc.bytes_sent");
    differentiate(worker, 0, 3);
    EXPECT_LT(counter(worker, "rpc.bytes_sent") - before, kLarge);
    EXPECT_EQ(sent(worker), 0);
  });
}

}  // namespace
}  // namespace torchspan::autograd_device_memory
