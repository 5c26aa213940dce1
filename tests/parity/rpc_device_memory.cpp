// Tensors that go from device to device through memory that both workers map, over the stand-in devices. In this
// memory, their copies run late: a message that is sent before its tensor is there, and memory that is used again
// before the tensor has been copied out of it, give wrong values. rpc_streams.cpp runs with such memory, too. And tensors
// that connections carry from device to device, as UCX's do between hosts.
#include <optional>

#include <ATen/ATen.h>

#include "tests/parity/rpc_faults.h"
#include "tests/parity/rpc_world.h"
#include "tests/support/stand_in_device.h"
#include "tests/support/stand_in_runtime.h"

namespace torchspan::rpc_device_memory {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::IsEmpty;

constexpr std::int64_t kLarge = 1 << 15;  // doubles: 256 KiB

at::Tensor twice(const at::Tensor& x) { return x * 2; }
at::Tensor same(const at::Tensor& x) { return x; }
at::Tensor slow_twice(Worker& worker, const at::Tensor& x) {
  nap(worker, std::chrono::seconds(1));
  return x * 2;
}
/// How many tensors this worker has sent through device memory.
std::int64_t sent(Worker& worker) {
  return static_cast<std::int64_t>(worker.runtime().metrics.snapshot()["rpc.device_memory.sent"]);
}
std::int64_t received(Worker& worker) {
  return static_cast<std::int64_t>(worker.runtime().metrics.snapshot()["rpc.device_memory.received"]);
}
at::Tensor fail(const at::Tensor&) { throw std::runtime_error("as asked"); }

constexpr Function<twice> kTwice{"twice"};
constexpr Function<same> kSame{"same"};
constexpr Function<slow_twice> kSlowTwice{"slow_twice"};
constexpr Function<sent> kSent{"sent"};
constexpr Function<received> kReceived{"received"};
constexpr Function<fail> kFail{"fail"};

/// Device 0 of worker 0 is device 1 of worker 1.
ClusterOptions world_with(std::size_t bytes, std::shared_ptr<StandInRuntime> runtime) {
  ClusterOptions options =
      world_of(2, FunctionTable().add(kTwice, kSame, kSlowTwice, kSent, kReceived, kFail));
  options.service.device_runtime = std::move(runtime);
  options.service.device_staging_bytes = bytes;
  options.adjust = [](int rank, WorkerPlan& plan) {
    if (rank == 0) plan.service.device_maps["worker1"] = DeviceMap({{stand_in(0), stand_in(1)}});
  };
  return options;
}

ClusterOptions world(std::size_t bytes = 16 << 20) {
  return world_with(bytes, std::make_shared<StandInRuntime>());
}

/// The same where connections carry tensors from device to device: on both sides, or only on that of one rank.
ClusterOptions connected_world(std::optional<int> only = std::nullopt) {
  ClusterOptions options = world();
  options.adjust = [only, inner = options.adjust](int rank, WorkerPlan& plan) {
    inner(rank, plan);
    if (!only || *only == rank) plan.device_memory = net::DeviceMemoryKind::kHost;
  };
  return options;
}

class RpcDeviceMemory : public ::testing::Test {
 protected:
  void SetUp() override { device_.reset(/*polls=*/3); }
  void TearDown() override {
    EXPECT_THAT(device_.take_races(), IsEmpty());
    device_.reset();
  }
  static at::Tensor on_device(double value, std::int64_t elements = kLarge) {
    return at::full({elements}, value, at::kDouble).to(stand_in(0));
  }
  static void expect_all(const at::Tensor& tensor, double value) {
    EXPECT_EQ(tensor.device(), stand_in(0));
    EXPECT_TRUE(at::equal(tensor.cpu(), at::full(tensor.sizes(), value, at::kDouble))) << tensor.cpu()[0];
  }
  /// Calls until arguments and results have gone through device memory.
  static void connect(Worker& worker) {
    for (int i = 0; i < 1000; ++i) {
      expect_all(worker.rpc_sync(1, kTwice, on_device(i, kLarge / 2)), 2.0 * i);
      if (sent(worker) > 0 && worker.rpc_sync(1, kSent) > 0) return;
      nap(worker, std::chrono::milliseconds(1));
    }
    ADD_FAILURE() << "all tensors went through host memory";
  }
  /// Expects that one tensor can go each way again, which needs the memory of all that were sent before.
  static void all_return(Worker& worker) {
    nap(worker, std::chrono::seconds(3));
    const std::int64_t here = sent(worker), there = worker.rpc_sync(1, kSent);
    expect_all(worker.rpc_sync(1, kTwice, on_device(7)), 14);
    EXPECT_EQ(sent(worker) - here, 1);
    EXPECT_EQ(worker.rpc_sync(1, kSent) - there, 1);
  }
  StandInStreams& device_ = StandInStreams::get();
};

/// Through memory that both map, or over connections.
class RpcDeviceWays : public RpcDeviceMemory, public ::testing::WithParamInterface<bool> {
 protected:
  static ClusterOptions its_world() { return GetParam() ? connected_world() : world(); }
};
INSTANTIATE_TEST_SUITE_P(Ways, RpcDeviceWays, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Connection" : "SharedMemory");
});

TEST_P(RpcDeviceWays, ArgumentsResultsAndFetchedValuesGoThroughIt) {
  on_first(its_world(), [](Worker& worker) {
    connect(worker);
    const std::int64_t here = sent(worker), there = worker.rpc_sync(1, kSent);
    const at::Tensor x = on_device(3);
    expect_all(worker.rpc_sync(1, kTwice, x), 6);
    expect_all(worker.rpc_async(1, kTwice, x + 1).wait(), 8);
    expect_all(worker.remote(1, kTwice, x + 2).to_here(), 10);
    expect_all(worker.rpc_sync(1, "aten::mul", {x, x}).toTensor(), 9);
    EXPECT_EQ(sent(worker) - here, 5);
    EXPECT_EQ(worker.rpc_sync(1, kSent) - there, 4);
  });
}

TEST_F(RpcDeviceMemory, IsTriedAgainSomeTimeAfterALackOfIt) {
  const auto runtime = std::make_shared<StandInRuntime>();
  on_first(world_with(16 << 20, runtime), [&](Worker& worker) {
    runtime->run_out_of_memory(2);  // one allocation of each worker
    for (int i = 0; i < 50; ++i) {
      expect_all(worker.rpc_sync(1, kTwice, on_device(i)), 2.0 * i);
      nap(worker, std::chrono::milliseconds(1));
    }
    EXPECT_EQ(sent(worker), 0);
    nap(worker, std::chrono::minutes(6));
    connect(worker);
  });
}

TEST_P(RpcDeviceWays, TensorsKeepTheirTypeShapeAndValues) {
  on_first(its_world(), [](Worker& worker) {
    connect(worker);
    const at::Tensor base = at::arange(2 * kLarge, at::kDouble).view({2, 128, kLarge / 128});
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kLong,
                                       at::kByte, at::kBool, at::kComplexDouble}) {
      const at::Tensor x = base.to(dtype);
      for (const at::Tensor& tensor : {x, x.transpose(0, 2), x.select(0, 1), x.narrow(2, 1, 200),
                                       x.select(2, 3).unsqueeze(0).expand({64, 2, 128})}) {
        const std::int64_t before = sent(worker);
        const at::Tensor back = worker.rpc_sync(1, kSame, tensor.to(stand_in(0)));
        EXPECT_EQ(sent(worker) - before, tensor.nbytes() >= (64 << 10) ? 1 : 0);
        EXPECT_EQ(back.scalar_type(), dtype);
        EXPECT_EQ(back.sizes(), tensor.sizes());
        EXPECT_TRUE(at::equal(back.cpu(), tensor)) << dtype << " " << tensor.sizes();
      }
    }
  });
}

TEST_P(RpcDeviceWays, SeveralTensorsOfAMessageMixWithThoseInHostMemory) {
  on_first(its_world(), [](Worker& worker) {
    connect(worker);
    const std::vector<at::Tensor> tensors{at::ones({kLarge}),
                                          on_device(1),
                                          at::full({3}, 2.0),
                                          on_device(3),
                                          on_device(4, 5),
                                          at::empty({0}),
                                          at::empty({0}).to(stand_in(0)),
                                          on_device(5)};
    const std::int64_t before = sent(worker);
    const auto back =
        worker.rpc_sync(1, "aten::cat", {c10::List<at::Tensor>({tensors[1], tensors[3], tensors[7]}), 0})
            .toTensor();
    EXPECT_EQ(sent(worker) - before, 3);
    EXPECT_TRUE(at::equal(back.cpu(), at::cat({tensors[1].cpu(), tensors[3].cpu(), tensors[7].cpu()})));
    const auto sum = worker.rpc_sync(1, "aten::add", {tensors[3], 2.5}).toTensor();
    EXPECT_TRUE(at::equal(sum.cpu(), at::full({kLarge}, 5.5, at::kDouble)));
  });
}

TEST_P(RpcDeviceWays, ArgumentsAreCapturedWhenTheCallIsMade) {
  on_first(its_world(), [&](Worker& worker) {
    connect(worker);
    const std::int64_t before = sent(worker);
    at::Tensor x = on_device(3);
    const Future<at::Tensor> y = worker.rpc_async(1, kTwice, x);
    x.fill_(100);
    expect_all(y.wait(), 6);
    EXPECT_EQ(sent(worker) - before, 1);
  });
}

/// The area has room for one tensor; the peer's return makes it free again.
TEST_F(RpcDeviceMemory, MemoryIsUsedAgainWhenThePeerHasReturnedIt) {
  on_first(world(300 << 10), [](Worker& worker) {
    connect(worker);
    nap(worker, std::chrono::milliseconds(50));
    const std::int64_t before = sent(worker);
    for (int i = 0; i < 20; ++i) {
      expect_all(worker.rpc_sync(1, kTwice, on_device(i)), 2.0 * i);
      nap(worker, std::chrono::milliseconds(50));
    }
    EXPECT_EQ(sent(worker) - before, 20);
    // Many at a time: those that find no room go through host memory.
    std::vector<Future<at::Tensor>> all;
    for (int i = 0; i < 20; ++i) all.push_back(worker.rpc_async(1, kTwice, on_device(i)));
    for (int i = 0; i < 20; ++i) expect_all(all[static_cast<std::size_t>(i)].wait(), 2.0 * i);
  });
}

TEST_P(RpcDeviceWays, CallsThatFailReturnTheirMemory) {
  on_first(GetParam() ? connected_world() : world(300 << 10), [](Worker& worker) {
    connect(worker);
    const Caller hasty = worker.with({.timeout = std::chrono::milliseconds(200)});
    for (int i = 0; i < 3; ++i) {
      nap(worker, std::chrono::seconds(3));
      std::int64_t before = sent(worker);
      expect_error(ErrorKind::kTimedOut, "slow_twice", [&] { hasty.rpc_sync(1, kSlowTwice, on_device(1)); });
      EXPECT_EQ(sent(worker) - before, 1);
      nap(worker, std::chrono::seconds(3));
      before = sent(worker);
      expect_error(ErrorKind::kRemoteFailure, "as asked", [&] { worker.rpc_sync(1, kFail, on_device(1)); });
      EXPECT_EQ(sent(worker) - before, 1);
      nap(worker, std::chrono::seconds(3));
      std::stop_source stop;
      before = sent(worker);
      const auto stopped = worker.with({.stop = stop.get_token()}).rpc_async(1, kSlowTwice, on_device(1));
      stop.request_stop();
      EXPECT_EQ(kind_of([&] { stopped.wait(); }), ErrorKind::kCancelled);
      EXPECT_EQ(sent(worker) - before, 1);
    }
    all_return(worker);  // with late replies, whose memory the other worker has again
  });
}

TEST_P(RpcDeviceWays, AMessageWithoutMemoryFailsItsCallOnly) {
  on_first_in(GetParam() ? connected_world() : world(300 << 10), [](Worker& worker, SimCluster& world) {
    connect(worker);
    for (const std::string from : {"worker0", "worker1"}) {
      nap(worker, std::chrono::seconds(1));
      run_out_of_memory(world, from);
      EXPECT_THAT(error_of([&] { worker.rpc_sync(1, kTwice, on_device(1)); }).what(), HasSubstr("bad_alloc"));
      all_return(worker);
    }
  });
}

/// The connections break while arguments and results are on the way, and the workers connect again.
TEST_F(RpcDeviceMemory, TensorsUnderWayAreFreedWhenTheirConnectionBreaks) {
  on_first_in(connected_world(), [](Worker& worker, SimCluster& world) {
    connect(worker);
    for (int round = 0; round < 20; ++round) {
      std::vector<Future<at::Tensor>> all;
      for (int i = 0; i < 4; ++i) all.push_back(worker.rpc_async(1, kTwice, on_device(i)));
      nap(worker, std::chrono::microseconds(10 * round));
      world.network().sever("worker0", "worker1");
      for (int i = 0; i < 4; ++i) {
        try {
          expect_all(all[static_cast<std::size_t>(i)].wait(), 2.0 * i);
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
        }
      }
    }
    all_return(worker);
  });
}

TEST_F(RpcDeviceMemory, LargerTensorsAndSmallOnesGoThroughHostMemory) {
  on_first(world(130 << 10), [](Worker& worker) {
    connect(worker);
    const std::int64_t before = sent(worker);
    for (const std::int64_t elements : {std::int64_t{16}, kLarge})
      expect_all(worker.rpc_sync(1, kTwice, on_device(3, elements)), 6);
    EXPECT_EQ(sent(worker), before);
  });
}

TEST_F(RpcDeviceMemory, WithoutItTensorsGoThroughHostMemory) {
  const auto refusing = std::make_shared<StandInRuntime>(true, "the device is in an exclusive mode");
  ClusterOptions without_maps = world();
  without_maps.adjust = {};
  for (const ClusterOptions& options : {world(0), world_with(1 << 20, refusing), without_maps}) {
    on_first(options, [&](Worker& worker) {
      for (int i = 0; i < 5; ++i) {
        const at::Tensor y = worker.rpc_sync(1, kTwice, on_device(i));
        EXPECT_TRUE(at::equal(y.cpu(), at::full({kLarge}, 2.0 * i, at::kDouble)));
        nap(worker, std::chrono::milliseconds(10));
      }
      EXPECT_EQ(sent(worker), 0);
      EXPECT_EQ(worker.rpc_sync(1, kSent), 0);
    });
  }
}

TEST_F(RpcDeviceMemory, LargeTensorsGoWholeOverConnections) {
  on_first(connected_world(), [](Worker& worker) {
    connect(worker);
    const std::int64_t before = sent(worker);
    expect_all(worker.rpc_sync(1, kTwice, on_device(4, 100 * kLarge)), 8);
    EXPECT_EQ(sent(worker) - before, 1);
    EXPECT_EQ(worker.runtime().metrics.snapshot()["rpc.tensor_parts.sent"], 0);
  });
}

TEST_F(RpcDeviceMemory, GoAnotherWayIfOnlyOneSideCarriesThem) {
  for (const int only : {0, 1}) {
    on_first(connected_world(only), [](Worker& worker) {
      for (int i = 0; i < 20; ++i) {
        expect_all(worker.rpc_sync(1, kTwice, on_device(i)), 2.0 * i);
        nap(worker, std::chrono::milliseconds(5));
      }
    });
  }
}

/// The device of the receiver has no room for an argument, which arrives on the host: the call fails, and its connection
/// does not.
TEST_F(RpcDeviceMemory, AFullDeviceFailsTheCallOnly) {
  on_first(connected_world(), [&](Worker& worker) {
    connect(worker);
    nap(worker, std::chrono::milliseconds(50));
    const std::int64_t there = worker.rpc_sync(1, kReceived);
    const Future<at::Tensor> y = worker.rpc_async(1, kTwice, on_device(3));
    device_.set_largest_allocation(100 << 10);
    expect_error(ErrorKind::kInvalid, "no memory left", [&] { y.wait(); });
    device_.set_largest_allocation(std::size_t{1} << 40);
    expect_all(worker.rpc_sync(1, kTwice, on_device(5)), 10);
    EXPECT_EQ(worker.rpc_sync(1, kReceived), there) << "for a minute, the host's memory is used";
    nap(worker, std::chrono::minutes(2));
    expect_all(worker.rpc_sync(1, kTwice, on_device(6)), 12);
    EXPECT_EQ(worker.rpc_sync(1, kReceived), there + 1);
  });
}

}  // namespace
}  // namespace torchspan::rpc_device_memory
