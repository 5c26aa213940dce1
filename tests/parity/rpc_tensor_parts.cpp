// Large tensors of devices that go to other workers in parts, through host memory or through device memory that both
// workers map, over the stand-in devices: their copies run late, so that a part which is sent before its copy, and memory
// that is used again too early, give wrong values. Calls that end in the middle, peers that die, peers of an earlier
// release, and peers that break the protocol.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include "rpc/tensor_parts/messages.h"
#include "tests/parity/rpc_faults.h"
#include "tests/support/stand_in_device.h"
#include "tests/support/stand_in_runtime.h"

namespace torchspan::rpc_tensor_parts {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::IsEmpty;

constexpr std::int64_t kLarge = 5 << 18;  // doubles: 10 MiB, three parts

at::Tensor twice(const at::Tensor& x) { return x * 2; }
at::Tensor same(const at::Tensor& x) { return x; }
/// Makes a tensor here and returns it.
at::Tensor filled(double value, std::int64_t elements) {
  return at::full({elements}, value, at::kDouble).to(stand_in(1));
}
double sum_of_all(const std::vector<at::Tensor>& all) {
  double sum = 0;
  for (const at::Tensor& one : all) sum += one.cpu().to(at::kDouble).sum().item<double>();
  return sum;
}
/// Gets a tensor of worker 0 on this worker's device 0.
double sum_of_filled(Worker& worker, double value, std::int64_t elements) {
  const at::Tensor filled =
      worker.rpc_sync(0, Function<torchspan::rpc_tensor_parts::filled>{"filled"}, value, elements);
  EXPECT_EQ(filled.device(), stand_in(0));
  return filled.cpu().sum().item<double>();
}
at::Tensor slow_filled(Worker& worker, double value) {
  nap(worker, std::chrono::seconds(1));
  return filled(value, kLarge);
}
std::int64_t counter(Worker& worker, const std::string& name) {
  return static_cast<std::int64_t>(worker.runtime().metrics.snapshot()[name]);
}

constexpr Function<twice> kTwice{"twice"};
constexpr Function<filled> kFilled{"filled"};
constexpr Function<sum_of_all> kSumOfAll{"sum_of_all"};
constexpr Function<same> kSame{"same"};
constexpr Function<sum_of_filled> kSumOfFilled{"sum_of_filled"};
constexpr Function<slow_filled> kSlowFilled{"slow_filled"};
constexpr Function<counter> kCounter{"counter"};

std::int64_t parts_sent(Worker& worker) { return counter(worker, "rpc.tensor_parts.sent"); }
constexpr const char* kSharedSent = "rpc.device_memory.sent";
constexpr std::int64_t kShared = 1 << 20;  ///< bytes of an area, of which a part takes a quarter

/// Device 0 of worker 0 is device 1 of worker 1. With `shared` bytes of device memory, smaller tensors go through it.
ClusterOptions world(std::size_t shared = 0) {
  ClusterOptions options =
      world_of(2, FunctionTable().add(kTwice, kFilled, kSumOfAll, kSlowFilled, kCounter));
  options.service.device_runtime = std::make_shared<StandInRuntime>();
  options.service.device_staging_bytes = shared;
  options.adjust = [](int rank, WorkerPlan& plan) {
    if (rank == 0) plan.service.device_maps["worker1"] = DeviceMap({{stand_in(0), stand_in(1)}});
  };
  return options;
}

class RpcTensorParts : public ::testing::Test {
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
  /// Calls until both workers send through device memory.
  static void connect(Worker& worker) {
    for (int i = 0; i < 1000; ++i) {
      expect_all(worker.rpc_sync(1, kTwice, on_device(i, 10000)), 2.0 * i);
      if (counter(worker, kSharedSent) > 0 && worker.rpc_sync(1, kCounter, kSharedSent) > 0) return;
      nap(worker, std::chrono::milliseconds(1));
    }
    ADD_FAILURE() << "all tensors went through host memory";
  }
  StandInStreams& device_ = StandInStreams::get();
};

/// Through either memory.
class RpcTensorPartsThrough : public RpcTensorParts, public ::testing::WithParamInterface<bool> {
 protected:
  static bool is_shared() { return GetParam(); }
  static ClusterOptions world_of_memory() { return world(is_shared() ? kShared : 0); }
  static void connect_if_shared(Worker& worker) {
    if (is_shared()) connect(worker);
  }
};
INSTANTIATE_TEST_SUITE_P(Memory, RpcTensorPartsThrough, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "OfDevices" : "OfTheHost"; });

TEST_F(RpcTensorParts, ArgumentsAndResultsOfCalls) {
  on_first(world(), [](Worker& worker) {
    at::Tensor x = on_device(3);
    const Future<at::Tensor> y = worker.rpc_async(1, kTwice, x);
    x.fill_(100);  // after the call
    expect_all(y.wait(), 6);
    EXPECT_EQ(parts_sent(worker), 1);
    EXPECT_EQ(worker.rpc_sync(1, kCounter, "rpc.tensor_parts.sent"), 1);
    EXPECT_EQ(worker.rpc_sync(1, kCounter, "rpc.tensor_parts.received"), 3);
    expect_all(worker.rpc_sync(1, kFilled, 5, kLarge + 1), 5);
    expect_all(worker.remote(1, kTwice, on_device(2)).to_here(), 4);
    EXPECT_EQ(parts_sent(worker), 2);
    expect_all(worker.rpc_sync(1, kTwice, on_device(1, kLarge / 2)), 2);
    EXPECT_EQ(parts_sent(worker), 2) << "a smaller tensor is copied as a whole";
  });
}

/// A part, in both directions; values that later calls fetch; memory that is free again.
TEST_F(RpcTensorParts, ArgumentsAndResultsGoThroughDeviceMemory) {
  on_first(world(kShared), [](Worker& worker) {
    connect(worker);
    const std::int64_t here = counter(worker, kSharedSent);
    const std::int64_t there = worker.rpc_sync(1, kCounter, kSharedSent);
    at::Tensor x = on_device(3);
    const Future<at::Tensor> y = worker.rpc_async(1, kTwice, x);
    x.fill_(100);  // after the call
    expect_all(y.wait(), 6);
    constexpr std::int64_t kParts = kLarge * 8 / (kShared / 4);
    EXPECT_EQ(counter(worker, kSharedSent) - here, kParts);
    EXPECT_EQ(worker.rpc_sync(1, kCounter, kSharedSent) - there, kParts);
    EXPECT_EQ(counter(worker, "rpc.tensor_parts.received"), kParts);
    const RRef<at::Tensor> z = worker.remote(1, kTwice, on_device(2, kLarge + 1));
    expect_all(z.to_here(), 4);
    at::Tensor again = z.to_here();
    again.fill_(0);  // the fetched tensor is this worker's own
    expect_all(z.to_here(), 4);
    EXPECT_EQ(counter(worker, kSharedSent) - here, 2 * kParts + 1);
    for (int i = 0; i < 8; ++i) expect_all(worker.rpc_sync(1, kTwice, on_device(i)), 2.0 * i);
    EXPECT_EQ(counter(worker, kSharedSent) - here, 10 * kParts + 1) << "memory was not returned";
  });
}

TEST_F(RpcTensorParts, KeepTypeShapeAndValuesInDeviceMemory) {
  ClusterOptions options = world(kShared);
  options.functions.add(kSame);
  on_first(options, [&](Worker& worker) {
    connect(worker);
    for (const at::ScalarType dtype :
         {at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kByte, at::kBool, at::kComplexDouble}) {
      const auto rows =
          512 / static_cast<std::int64_t>(c10::elementSize(dtype));  // the least that goes in parts
      const at::Tensor x = at::arange(2 * 3 * rows * 1024, at::kDouble).view({2, 3, rows, 1024}).to(dtype);
      for (const at::Tensor& tensor : {x, x.transpose(0, 3), x.select(0, 1), x.narrow(3, 1, 900),
                                       x.contiguous(at::MemoryFormat::ChannelsLast),
                                       x.select(1, 2).unsqueeze(0).expand({3, 2, rows, 1024})}) {
        const std::int64_t before = counter(worker, kSharedSent);
        const at::Tensor back = worker.rpc_sync(1, kSame, tensor.to(stand_in(0)));
        constexpr std::int64_t kPart = kShared / 4;
        EXPECT_EQ(counter(worker, kSharedSent) - before,
                  (static_cast<std::int64_t>(tensor.nbytes()) + kPart - 1) / kPart);
        EXPECT_EQ(back.scalar_type(), dtype);
        EXPECT_EQ(back.device(), stand_in(0));
        EXPECT_TRUE(at::equal(back.cpu(), tensor)) << dtype << " " << tensor.sizes();
      }
    }
    at::Tensor y;
    {
      const c10::InferenceMode inference;
      y = worker.rpc_sync(1, kTwice, on_device(4));
    }
    EXPECT_FALSE(y.is_inference());
    expect_all(y.requires_grad_().detach(), 8);
  });
}

/// Threads of the pool return no memory: all of them may wait for tensors that need it.
TEST_F(RpcTensorParts, NeedNoThreadOfTheReceiversPool) {
  ClusterOptions options = world(kShared);
  options.functions.add(kSumOfFilled);
  options.threads = 1;
  options.service.max_threads = 1;
  const auto adjust = options.adjust;
  options.adjust = [adjust](int rank, WorkerPlan& plan) {
    adjust(rank, plan);
    if (rank == 1) plan.service.device_maps["worker0"] = DeviceMap({{stand_in(0), stand_in(1)}});
  };
  on_first(options, [](Worker& worker) {
    for (int i = 0; i < 1000 && counter(worker, kSharedSent) == 0; ++i) {
      try {
        EXPECT_EQ(worker.rpc_sync(1, kSumOfFilled, 1, 20000), 20000);
      } catch (const Error& error) {  // the offer of the memory needs a thread
        EXPECT_THAT(error.what(), HasSubstr("all 1 threads wait"));
      }
      nap(worker, std::chrono::milliseconds(1));
    }
    const std::int64_t before = counter(worker, kSharedSent);
    EXPECT_EQ(worker.rpc_sync(1, kSumOfFilled, 2, kLarge), 2.0 * kLarge);
    EXPECT_EQ(counter(worker, kSharedSent) - before, kLarge * 8 / (kShared / 4));
  });
}

/// The device of the receiver has no room for an argument: the call fails, and its connection does not.
TEST_F(RpcTensorParts, AFullDeviceFailsTheCallOnly) {
  on_first(world(kShared), [&](Worker& worker) {
    connect(worker);
    expect_all(worker.rpc_sync(1, kTwice, on_device(1)), 2);
    const at::Tensor x = on_device(3, 3 * kLarge / 2);
    const Future<at::Tensor> y = worker.rpc_async(1, kTwice, x);
    device_.set_largest_allocation(kLarge * 8);
    expect_error(ErrorKind::kInvalid, "no memory left", [&] { y.wait(); });
    EXPECT_EQ(worker.rpc_sync(1, kCounter, "rpc.tensor_parts.received"), 40 + 60);
    device_.set_largest_allocation(std::size_t{1} << 40);
    expect_all(worker.rpc_sync(1, kTwice, on_device(2)), 4);
  });
}

/// Parts in device memory are not sent to a worker that does not read them.
TEST_F(RpcTensorParts, APeerOfAnEarlierReleaseGetsThemThroughHostMemory) {
  ClusterOptions options = world(kShared);
  const auto adjust = options.adjust;
  options.adjust = [adjust](int rank, WorkerPlan& plan) {
    adjust(rank, plan);
    if (rank == 1) plan.join.wire = {.oldest = 1, .newest = 1, .features = 0};
  };
  on_first(options, [](Worker& worker) {
    connect(worker);
    const std::int64_t here = counter(worker, kSharedSent);
    for (int i = 0; i < 3; ++i) expect_all(worker.rpc_sync(1, kTwice, on_device(i)), 2.0 * i);
    EXPECT_EQ(parts_sent(worker), 3);
    EXPECT_EQ(counter(worker, kSharedSent), here);
    EXPECT_EQ(worker.rpc_sync(1, kCounter, "rpc.tensor_parts.received"), 3 * 3);
  });
}

TEST_F(RpcTensorParts, TensorsOfOneMessageTravelInDifferentWays) {
  on_first(world(kShared), [](Worker& worker) {
    const std::vector<at::Tensor> tensors{
        on_device(1, 20000), on_device(2),    at::ones({7}), on_device(3, kLarge + 3),
        on_device(4, 20001), on_device(5, 3), on_device(6)};
    const double expected = sum_of_all(tensors);
    constexpr int kCalls = 6;
    for (int i = 0; i < kCalls; ++i) {
      EXPECT_EQ(worker.rpc_sync(1, kSumOfAll, tensors), expected);
      nap(worker, std::chrono::milliseconds(5));
    }
    EXPECT_EQ(parts_sent(worker), kCalls * 3);
    EXPECT_GT(counter(worker, "rpc.device_memory.sent"), 2);
  });
}

TEST_P(RpcTensorPartsThrough, ManyCallsAtATime) {
  on_first(world_of_memory(), [](Worker& worker) {
    connect_if_shared(worker);
    std::vector<Future<at::Tensor>> all;
    for (int i = 0; i < 20; ++i) all.push_back(worker.rpc_async(1, kTwice, on_device(i, kLarge + i)));
    for (int i = 0; i < 20; ++i) expect_all(all[static_cast<std::size_t>(i)].wait(), 2.0 * i);
    EXPECT_GE(parts_sent(worker), 16) << "those beyond the limit are copied as a whole";
  });
}

/// Calls that are cancelled, or whose deadline passes, while their parts are sent: later ones are not disturbed.
TEST_P(RpcTensorPartsThrough, CallsThatEndInTheMiddle) {
  on_first(world_of_memory(), [&](Worker& worker) {
    connect_if_shared(worker);
    for (const int microseconds : {1, 50, 300, 1000, 3000, 10000, 30000}) {
      const Duration limit = std::chrono::microseconds(microseconds);
      try {
        expect_all(worker.with({.timeout = limit}).rpc_sync(1, kTwice, on_device(1)), 2);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kTimedOut) << error.what();
      }
      std::stop_source stop;
      const auto stopped = worker.with({.stop = stop.get_token()}).rpc_async(1, kTwice, on_device(1));
      nap(worker, limit);
      stop.request_stop();
      try {
        expect_all(stopped.wait(), 2);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
      }
      expect_all(worker.rpc_sync(1, kTwice, on_device(microseconds)), 2.0 * microseconds);
    }
    expect_error(ErrorKind::kTimedOut, "slow_filled", [&] {
      worker.with({.timeout = std::chrono::milliseconds(500)}).rpc_sync(1, kSlowFilled, 1);
    });
    nap(worker, std::chrono::seconds(3));
    expect_all(worker.rpc_sync(1, kSlowFilled, 9), 9);
  });
}

/// The peer dies before, while and after the parts are sent.
TEST_P(RpcTensorPartsThrough, APeerThatDiesIsNamed) {
  std::size_t failed = 0, fine = 0;
  for (const int microseconds : {0, 20, 100, 500, 1000, 2000, 5000, 20000, 1000000}) {
    ClusterOptions options = world_of_memory();
    options.graceful = false;
    SimCluster cluster(options);
    std::exception_ptr failure;
    cluster.try_services([&](rpc::WorkerService& service) {
      Worker& worker = service.worker();
      if (worker.rank() == 1) {
        nap(worker, std::chrono::minutes(1));
        return;
      }
      connect_if_shared(worker);
      expect_all(worker.rpc_sync(1, kTwice, on_device(1, 5)), 2);
      const auto y = worker.with({.timeout = std::chrono::seconds(40)}).rpc_async(1, kTwice, on_device(1));
      nap(worker, std::chrono::microseconds(microseconds));
      cluster.kill(1);
      try {
        expect_all(y.wait(), 2);
        ++fine;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
        EXPECT_EQ(error.worker(), "worker1") << error.what();
        ++failed;
      }
      expect_error(ErrorKind::kDisconnected, "worker1", [&] { worker.rpc_sync(1, kTwice, on_device(1)); });
    });
  }
  EXPECT_GE(failed, 3);
  EXPECT_GE(fine, 1);
}

/// A part is missing, as if the peer had not sent it.
TEST_F(RpcTensorParts, AMessageWithoutAllItsPartsEndsTheConnectionByName) {
  SimCluster cluster(world());
  std::size_t parts = 0;
  cluster.network().drop_if([&](const net::SimMessage& message) {
    return request_type(message) == rpc::TensorPart::kType && ++parts == 2;
  });
  ::testing::internal::CaptureStderr();
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    expect_error(ErrorKind::kDisconnected, "worker1", [&] { worker.rpc_sync(1, kTwice, on_device(1)); });
    expect_all(worker.rpc_sync(1, kTwice, on_device(2)), 4);  // on a new connection
  });
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr("worker 'worker0' (rank 0) sent a tensor in parts: a message has tensor 1 in parts, and "
                "6291456 of its 10485760 bytes had arrived"));
}

}  // namespace
}  // namespace torchspan::rpc_tensor_parts
