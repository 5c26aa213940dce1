// Large tensors of devices that go to other workers in parts, over the stand-in devices: their copies to the host run
// late, so that a part which is sent before its copy gives wrong values. Calls that end in the middle, peers that die,
// and peers that break the protocol.
#include <ATen/ATen.h>

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
/// Makes a tensor here and returns it.
at::Tensor filled(double value, std::int64_t elements) {
  return at::full({elements}, value, at::kDouble).to(stand_in(1));
}
double sum_of_all(const std::vector<at::Tensor>& all) {
  double sum = 0;
  for (const at::Tensor& one : all) sum += one.cpu().to(at::kDouble).sum().item<double>();
  return sum;
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
constexpr Function<slow_filled> kSlowFilled{"slow_filled"};
constexpr Function<counter> kCounter{"counter"};

std::int64_t parts_sent(Worker& worker) { return counter(worker, "rpc.tensor_parts.sent"); }

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
  StandInStreams& device_ = StandInStreams::get();
};

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

TEST_F(RpcTensorParts, TensorsOfOneMessageTravelInDifferentWays) {
  on_first(world(1 << 20), [](Worker& worker) {
    const std::vector<at::Tensor> tensors{
        on_device(1, 20000), on_device(2),    at::ones({7}), on_device(3, kLarge + 3),
        on_device(4, 20001), on_device(5, 3), on_device(6)};
    const double expected = sum_of_all(tensors);
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(worker.rpc_sync(1, kSumOfAll, tensors), expected);
      nap(worker, std::chrono::milliseconds(5));
    }
    EXPECT_EQ(parts_sent(worker), 20 * 3);
    EXPECT_GT(counter(worker, "rpc.device_memory.sent"), 2);
  });
}

TEST_F(RpcTensorParts, ManyCallsAtATime) {
  on_first(world(), [](Worker& worker) {
    std::vector<Future<at::Tensor>> all;
    for (int i = 0; i < 20; ++i) all.push_back(worker.rpc_async(1, kTwice, on_device(i, kLarge + i)));
    for (int i = 0; i < 20; ++i) expect_all(all[static_cast<std::size_t>(i)].wait(), 2.0 * i);
    EXPECT_GE(parts_sent(worker), 16) << "those beyond the limit are copied as a whole";
  });
}

/// Calls that are cancelled, or whose deadline passes, while their parts are sent: later ones are not disturbed.
TEST_F(RpcTensorParts, CallsThatEndInTheMiddle) {
  ClusterOptions options = world();
  on_first(options, [&](Worker& worker) {
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
TEST_F(RpcTensorParts, APeerThatDiesIsNamed) {
  std::size_t failed = 0, fine = 0;
  for (const int microseconds : {0, 20, 100, 500, 1000, 2000, 5000, 20000, 1000000}) {
    ClusterOptions options = world();
    options.graceful = false;
    SimCluster cluster(options);
    std::exception_ptr failure;
    cluster.try_services([&](rpc::WorkerService& service) {
      Worker& worker = service.worker();
      if (worker.rank() == 1) {
        nap(worker, std::chrono::minutes(1));
        return;
      }
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
