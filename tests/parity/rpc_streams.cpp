// Streams of devices in calls, over the stand-in devices, which report every access that nothing orders, or on GPUs:
// results and arguments are ready on the streams that use them, and no thread waits for a whole device.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <torchspan/detail/device/streams.h>

#include "tests/parity/rpc_world.h"
#include "tests/support/test_device.h"

namespace torchspan::rpc_streams {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::IsEmpty;

constexpr std::int64_t kSmall = 16, kLarge = 1 << 15;  // elements: copied directly, and by way of the device

/// Another stream than the default one, which is busy.
c10::Stream side_stream() {
  const c10::Stream stream = device::stream_from_pool(test_device(0));
  keep_busy(stream);
  return stream;
}
c10::Stream main_stream() { return device::default_stream(test_device(0)); }
void order(const c10::Stream& earlier, const c10::Stream& later) {
  device::EventPool events;
  device::order_after(later, earlier, events);
}

at::Tensor twice(const at::Tensor& x) { return x * 2; }
/// Calls the next worker on another stream, and works on the result there.
at::Tensor through(Worker& worker, const at::Tensor& x);
/// The same over several waits, each of which may continue on another thread.
Task<at::Tensor> through_slowly(Worker& worker, const at::Tensor& x);
/// Leaves another stream current, as a careless program does; returns the number of the one that it found.
std::int64_t swap_stream() {
  const c10::Stream here = device::current_stream(test_device(0));
  c10::impl::getDeviceGuardImpl(here.device_type())->exchangeStream(side_stream());
  return here.id();
}
void add_in_place(const RRef<at::Tensor>& value, double by) {
  const at::NoGradGuard no_grad;
  value.local_value().add_(by);
}

std::vector<at::Tensor> same_all(const std::vector<at::Tensor>& all) { return all; }
bool needs_gradient(const at::Tensor& x) { return x.is_leaf() && (x * x).requires_grad(); }
bool is_inference(const at::Tensor& x) { return x.is_inference(); }

constexpr Function<twice> kTwice{"twice"};
constexpr Function<same_all> kSameAll{"same_all"};
constexpr Function<needs_gradient> kNeedsGradient{"needs_gradient"};
constexpr Function<is_inference> kIsInference{"is_inference"};
constexpr Function<through> kThrough{"through"};
constexpr Function<through_slowly> kThroughSlowly{"through_slowly"};
constexpr Function<swap_stream> kSwapStream{"swap_stream"};
constexpr Function<add_in_place> kAddInPlace{"add_in_place"};

/// A module without autograd, as far as streams are concerned.
struct Scale {
  explicit Scale(at::Tensor its_factor) : factor(std::move(its_factor)) {}
  at::Tensor forward(const at::Tensor& x) const { return x * factor; }
  at::Tensor factor;
};
constexpr Class<Scale, at::Tensor> kScale{"Scale"};
constexpr Function<&Scale::forward> kForward{"Scale.forward"};

int next_of(const Worker& worker) { return (worker.rank() + 1) % worker.world_size(); }

at::Tensor through(Worker& worker, const at::Tensor& x) {
  const c10::Stream here = device::current_stream(test_device(0)), side = side_stream();
  order(here, side);
  device::keep_memory_for(x, side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = worker.rpc_sync(next_of(worker), kTwice, x + 1) + 1;
  }
  order(side, here);
  device::keep_memory_for(y, here);
  return y;
}

Task<at::Tensor> through_slowly(Worker& worker, const at::Tensor& x) {
  const c10::Stream here = device::current_stream(test_device(0)), side = side_stream();
  order(here, side);
  device::keep_memory_for(x, side);
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x + 0;
    for (int i = 0; i < 3; ++i) {
      y = (co_await worker.rpc_async(next_of(worker), kTwice, y)) + 1;
      EXPECT_EQ(device::current_stream(test_device(0)), side);
    }
  }
  order(side, here);
  device::keep_memory_for(y, here);
  co_return y;
}

/// The parameter: whether tensors go through memory that both workers map, instead of host memory.
class RpcStreams : public ::testing::TestWithParam<bool> {
 protected:
  /// A world where device 0 is device 0 everywhere.
  static ClusterOptions world(int workers = 2) {
    ClusterOptions options =
        world_of(workers, FunctionTable().add(kTwice, kSameAll, kNeedsGradient, kIsInference, kThrough,
                                              kThroughSlowly, kSwapStream, kAddInPlace, kScale, kForward));
    if (GetParam()) options.service.device_runtime = test_runtime();
    options.adjust = [workers](int rank, WorkerPlan& plan) {
      for (int other = 0; other < workers; ++other) {
        if (other != rank)
          plan.service.device_maps[SimCluster::name(other)] = DeviceMap({{test_device(0), test_device(0)}});
      }
    };
    return options;
  }
  void SetUp() override {
    // CUDA does not map memory into the process that exported it.
    if (const auto missing = TestDevices::missing(1, GetParam()); !missing.empty()) GTEST_SKIP() << missing;
    TestDevices::reset();
  }
  void TearDown() override {
    EXPECT_THAT(TestDevices::take_races(), IsEmpty());
    TestDevices::reset();
  }
  static at::Tensor on_device(double value, std::int64_t elements) {
    return at::full({elements}, value, at::kDouble).to(test_device(0));
  }
  static void expect_all(const at::Tensor& tensor, double value) {
    EXPECT_TRUE(at::equal(tensor.cpu(), at::full(tensor.sizes(), value, at::kDouble))) << tensor.cpu()[0];
  }
};
INSTANTIATE_TEST_SUITE_P(Through, RpcStreams, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "DeviceMemory" : "HostMemory");
});

// peer: rpc_test.py `custom_stream`(`_multi`, `_nested`, `_nested_multi`) of the CUDA suite: same, over simulated
//   devices that report races
TEST_P(RpcStreams, ArgumentsAndResultsAreReadyOnTheCallersStream) {
  for (const std::int64_t elements : {kSmall, kLarge}) {
    on_first(world(), [&](Worker& worker) {
      const at::Tensor x = on_device(3, elements);
      const c10::Stream side = side_stream();
      order(main_stream(), side);
      const c10::StreamGuard guard(side);
      device::keep_memory_for(x, side);
      for (const int to : {1, 0}) {
        expect_all(worker.rpc_sync(to, kTwice, x + 1) + 1, 9);
        expect_all(worker.rpc_async(to, kTwice, x + 2).wait() + 1, 11);
        expect_all(worker.remote(to, kTwice, x + 3).to_here() + 1, 13);
        expect_all(worker.rpc_sync(to, "aten::mul", {x + 1, x}).toTensor() + 1, 13);
      }
    });
  }
}

// peer: rpc_test.py `async_execution_with_cuda_future`, `async_execution_nested_with_cuda_future`: same, with coroutines
TEST_P(RpcStreams, NestedCallsOnOtherStreamsAreOrdered) {
  on_first(world(3), [&](Worker& worker) {
    for (const std::int64_t elements : {kSmall, kLarge}) {
      const at::Tensor x = on_device(3, elements);
      std::vector<Future<at::Tensor>> all;
      for (int i = 0; i < 3; ++i) all.push_back(worker.rpc_async(1, kThrough, x + i));
      for (int i = 0; i < 3; ++i) expect_all(all[i].wait(), 2 * (4 + i) + 1);
      all.clear();
      for (int i = 0; i < 3; ++i) all.push_back(worker.rpc_async(1, kThroughSlowly, x + i));
      for (int i = 0; i < 3; ++i) expect_all(all[i].wait(), 8 * (3 + i) + 7);
    }
  });
}

TEST_P(RpcStreams, ArgumentsAreCapturedWhenTheCallIsMade) {
  for (const std::int64_t elements : {kSmall, kLarge}) {
    TestDevices::reset(/*polls=*/5);
    on_first(world(), [&](Worker& worker) {
      for (const int to : {1, 0}) {
        at::Tensor x = on_device(3, elements);
        const Future<at::Tensor> y = worker.rpc_async(to, kTwice, x);
        x.fill_(100);
        expect_all(y.wait(), 6);
      }
    });
  }
}

TEST_P(RpcStreams, CallsDoNotWaitForTheDevice) {
  if (const auto missing = TestDevices::missing(1, /*needs_stand_ins=*/true); !missing.empty())
    GTEST_SKIP() << missing;
  TestDevices::reset(/*polls=*/5);
  ClusterOptions options = world();
  options.adjust = {};  // without device maps, results arrive on the CPU
  on_first(options, [&](Worker& worker) {
    const at::Tensor small = on_device(3, kSmall), large = on_device(3, kLarge);
    const std::size_t before = StandInStreams::get().host_waits();
    for (const at::Tensor& x : {small, large}) {
      const Future<at::Tensor> y = worker.rpc_async(1, kTwice, x.expand({2, x.size(0)}).t());
      EXPECT_TRUE(at::equal(y.wait(), at::full({x.size(0), 2}, 6.0, at::kDouble)));
    }
    EXPECT_EQ(StandInStreams::get().host_waits(), before);
  });
}

/// A caller that waits, and a worker that replies, ask the device themselves: no timer delays the message.
TEST_P(RpcStreams, CopiesThatAreSoonCompleteDelayNoMessage) {
  if (const auto missing = TestDevices::missing(1, /*needs_stand_ins=*/true); !missing.empty())
    GTEST_SKIP() << missing;
  ClusterOptions options = world();
  options.spin = std::chrono::microseconds(150);
  options.network.latency = {};
  on_first(options, [&](Worker& worker) {
    const at::Tensor x = on_device(3, kSmall);
    expect_all(worker.rpc_sync(1, kTwice, x), 6);  // connects
    TestDevices::reset(/*polls=*/3);
    const TimePoint began = worker.runtime().executor.now();
    const at::Tensor y = worker.rpc_sync(1, kTwice, x);
    EXPECT_LT(worker.runtime().executor.now() - began, std::chrono::microseconds(20)) << "the first timer";
    expect_all(y, 6);
  });
}

TEST_P(RpcStreams, ACallWhoseTensorsAreNeverReadyEndsByItsDeadlineOrByAStop) {
  if (const auto missing = TestDevices::missing(1, /*needs_stand_ins=*/true); !missing.empty())
    GTEST_SKIP() << missing;
  TestDevices::reset(/*polls=*/1 << 30);
  on_first(world(), [&](Worker& worker) {
    const at::Tensor x = on_device(3, kLarge);
    expect_error(ErrorKind::kTimedOut, "twice",
                 [&] { worker.with({.timeout = std::chrono::milliseconds(200)}).rpc_sync(1, kTwice, x); });
    expect_error(ErrorKind::kCancelled, "no reply came before the deadline", [&] {
      worker.with({.timeout = std::chrono::milliseconds(200)}).remote(1, kTwice, x).to_here();
    });
    std::stop_source stop;
    const Future<at::Tensor> stopped = worker.with({.stop = stop.get_token()}).rpc_async(1, kTwice, x);
    stop.request_stop();
    expect_error(ErrorKind::kCancelled, "twice", [&] { stopped.wait(); });
    // A call without tensors is not held up by those that wait.
    EXPECT_EQ(worker.rpc_sync(1, kSwapStream), 0);
  });
}

TEST_P(RpcStreams, AWorkerThatStopsDropsWhatItStillCopies) {
  if (const auto missing = TestDevices::missing(1, /*needs_stand_ins=*/true); !missing.empty())
    GTEST_SKIP() << missing;
  TestDevices::reset(/*polls=*/1 << 30);
  ClusterOptions options = world();
  options.graceful = false;
  on_all(options, [&](Worker& worker) {
    if (worker.rank() != 0) return nap(worker, std::chrono::seconds(1));
    static_cast<void>(worker.rpc_async(1, kTwice, on_device(3, kLarge)));
  });
}

/// What a handler left current does not concern the next one.
TEST_P(RpcStreams, HandlersStartOnTheDefaultStreams) {
  ClusterOptions options = world();
  options.threads = 1;
  on_first(options, [&](Worker& worker) {
    for (int i = 0; i < 4; ++i) EXPECT_EQ(worker.rpc_sync(1, kSwapStream), 0);
  });
}

// peer: rpc_test.py `rref_as_arg_synchronization`1 to 5, `rref_to_here_synchronization`1 to 4
//   of the CUDA suite: same, over simulated devices; handlers of a worker are ordered on its default streams
TEST_P(RpcStreams, CallsOfAWorkerToItselfAreOrderedWithTheCallersStreams) {
  on_first(world(), [&](Worker& worker) {
    const c10::Stream side = side_stream();
    order(main_stream(), side);
    const c10::StreamGuard guard(side);
    const RRef<at::Tensor> value(worker, on_device(1, kSmall) * 5);  // made on the side stream
    for (int i = 0; i < 3; ++i) {
      worker.rpc_sync(0, kAddInPlace, value, 1.0);
      value.local_value().mul_(2);
    }
    expect_all(value.local_value(), 54);
    order(side, main_stream());
    device::keep_memory_for(value.local_value(), main_stream());
  });
}

// peer: rpc_test.py `rref_forward_synchronization`1 to 4, `owner_rref_forward_synchronization`1 to 4 of the CUDA suite:
//   same, over simulated devices that report races
TEST_P(RpcStreams, CallsThroughReferencesAreOrderedWithTheCallersStreams) {
  for (const std::int64_t elements : {kSmall, kLarge}) {
    on_first(world(), [&](Worker& worker) {
      const c10::Stream side = side_stream();
      order(main_stream(), side);
      const c10::StreamGuard guard(side);
      for (const int owner : {1, 0}) {
        const at::Tensor factor = on_device(2, elements) + 1;  // made on the side stream
        const RRef<Scale> scale = worker.remote(owner, kScale, factor);
        at::Tensor x = on_device(1, elements);
        for (int i = 0; i < 3; ++i) x = scale.rpc_sync(kForward, x) + 1;
        expect_all(x, 40);
        expect_all(scale.rpc_async(kForward, x + 1).wait() + 1, 124);
        expect_all(scale.remote(kForward, x + 2).to_here() + 1, 127);
      }
    });
  }
}

std::int64_t bytes_sent(const Worker& worker) {
  return static_cast<std::int64_t>(worker.runtime().metrics.snapshot()["rpc.bytes_sent"]);
}

TEST_P(RpcStreams, TensorsOfAWorkersCallsToItselfStayOnTheirDevices) {
  TestDevices::reset(/*polls=*/3);
  on_first(world(), [&](Worker& worker) {
    const std::int64_t before = bytes_sent(worker);
    const at::Tensor x = on_device(3, kLarge).view({4, -1});
    for (const at::Tensor& tensor :
         {x, x.t(), x.select(0, 1), x.narrow(1, 5, 1000), x.select(1, 2).expand({9, 4})}) {
      const at::Tensor y = worker.rpc_sync(0, kTwice, tensor);
      EXPECT_EQ(y.device(), test_device(0));
      EXPECT_EQ(y.sizes(), tensor.sizes());
      expect_all(y, 6);
    }
    EXPECT_LT(bytes_sent(worker) - before, kLarge);  // a tensor has eight times as many
  });
}

TEST_P(RpcStreams, TensorsOfAWorkersCallsToItselfMixWithThoseOfTheHost) {
  on_first(world(), [&](Worker& worker) {
    const std::vector<at::Tensor> all{at::full({3}, 1.0),
                                      on_device(2, kSmall),
                                      at::Tensor(),
                                      at::full({4}, 3.0),
                                      at::empty({0}).to(test_device(0)),
                                      on_device(4, kLarge),
                                      at::full({5}, 5.0)};
    const std::vector<at::Tensor> back = worker.rpc_sync(0, kSameAll, all);
    ASSERT_EQ(back.size(), all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(back[i].defined(), all[i].defined()) << i;
      if (!all[i].defined()) continue;
      EXPECT_EQ(back[i].device(), all[i].device()) << i;
      EXPECT_TRUE(at::equal(back[i].cpu(), all[i].cpu())) << i;
      if (all[i].numel() > 0) EXPECT_NE(back[i].data_ptr(), all[i].data_ptr()) << i;
    }
  });
}

TEST_P(RpcStreams, AHandlerOfTheSameWorkerMayDifferentiateItsArguments) {
  on_first(world(), [&](Worker& worker) {
    EXPECT_TRUE(worker.rpc_sync(0, kNeedsGradient, on_device(3, kLarge).requires_grad_()));
    EXPECT_FALSE(worker.rpc_sync(0, kNeedsGradient, on_device(3, kLarge)));
    const c10::InferenceMode inference;
    EXPECT_FALSE(worker.rpc_sync(0, kIsInference, on_device(3, kLarge)));
  });
}

}  // namespace
}  // namespace torchspan::rpc_streams
