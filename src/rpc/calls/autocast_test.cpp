#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <torchspan/rpc/worker.h>

#include "device/api/autocast_compat.h"
#include "rpc/calls/autocast_header.h"
#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::rpc::autocast_test {
namespace {

using device::Autocast;
using device::AutocastScope;
using ::testing::ElementsAre;
using torchspan::testing::ClusterOptions;
using torchspan::testing::error_of;
using torchspan::testing::SimCluster;

/// On the CPU and, with that dtype, on GPUs, which this process need not have.
Autocast to(at::ScalarType dtype = at::kBFloat16) {
  return {{{c10::DeviceType::CPU, at::kBFloat16}, {c10::DeviceType::CUDA, dtype}}, true};
}

/// "off", or the dtype for GPUs.
std::string mode_here() {
  const Autocast here = Autocast::of_thread();
  return here.enabled() ? c10::toString(here.modes.back().dtype) : "off";
}
at::Tensor product(const at::Tensor& x, const at::Tensor& y) { return at::matmul(x, y); }
std::string mode_there(Worker&) { return mode_here(); }
bool caches(Worker&) { return at::autocast::is_autocast_cache_enabled(); }

/// Changes autocast in a nested way and leaves it as it is, by an exception too.
std::vector<std::string> nested(Worker& worker, bool fails);
/// Waits between its looks at autocast, so that several threads run it.
Task<std::vector<std::string>> slow(Worker& worker);
Future<std::string> continued(Worker& worker);

constexpr Function<product> kProduct{"product"};
constexpr Function<mode_there> kMode{"mode_there"};
constexpr Function<caches> kCaches{"caches"};
constexpr Function<nested> kNested{"nested"};
constexpr Function<slow> kSlow{"slow"};
constexpr Function<continued> kContinued{"continued"};

std::vector<std::string> nested(Worker& worker, bool fails) {
  std::vector<std::string> seen{mode_here()};
  const int next = (worker.rank() + 1) % worker.world_size();
  {
    AutocastScope off;
    off.enter({});
    seen.push_back(worker.rpc_sync(next, kMode));
    AutocastScope again;
    again.enter(to(at::kFloat));
    seen.push_back(worker.rpc_sync(next, kMode));
  }
  seen.push_back(worker.rpc_sync(next, kMode));
  // Left behind, as code without scopes does.
  at::autocast::set_autocast_cache_enabled(false);
  device::compat::set_autocast_dtype(c10::DeviceType::CUDA, at::kHalf);
  device::compat::set_autocast_enabled(c10::DeviceType::CUDA, true);
  device::compat::set_autocast_enabled(c10::DeviceType::CPU, true);
  if (fails) throw std::runtime_error("failed under autocast");
  return seen;
}

Task<std::vector<std::string>> slow(Worker& worker) {
  std::vector<std::string> seen{mode_here()};
  const int next = (worker.rank() + 1) % worker.world_size();
  for (int i = 0; i < 3; ++i) {
    seen.push_back(co_await worker.rpc_async(next, kMode));
    seen.push_back(mode_here());
  }
  co_return seen;
}

Future<std::string> continued(Worker& worker) {
  return worker.rpc_async((worker.rank() + 1) % worker.world_size(), kMode)
      .then([](const Future<std::string>&) { return mode_here(); });
}

/// Runs `body` on worker 0 of a world whose workers have one thread for handlers.
void on_first(const std::function<void(Worker&)>& body) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    ClusterOptions options;
    options.workers = 3;
    options.threads = 1;
    options.seed = seed;
    options.functions.add(kProduct, kMode, kCaches, kNested, kSlow, kContinued);
    SimCluster world(options);
    world.run([&](Worker& worker) {
      if (worker.rank() == 0) body(worker);
    });
  }
}

TEST(RemoteAutocast, GivesTheResultsOfALocalCall) {
  on_first([](Worker& worker) {
    const at::Tensor x = at::randn({8, 8}), y = at::randn({8, 8});
    const at::Tensor plain = product(x, y);
    EXPECT_TRUE(at::equal(worker.rpc_sync(1, kProduct, x, y), plain));
    {
      AutocastScope scope;
      scope.enter(to());
      const at::Tensor local = product(x, y);
      EXPECT_EQ(local.scalar_type(), at::kBFloat16);
      for (const at::Tensor& remote : {worker.rpc_sync(1, kProduct, x, y), worker.rpc_sync(0, kProduct, x, y),
                                       worker.remote(1, kProduct, x, y).to_here(),
                                       worker.rpc_sync(1, "aten::matmul", {x, y}).toTensor()}) {
        EXPECT_EQ(remote.scalar_type(), at::kBFloat16);
        EXPECT_TRUE(at::equal(remote, local));
      }
    }
    EXPECT_TRUE(at::equal(worker.rpc_sync(1, kProduct, x, y), plain));
  });
}

TEST(RemoteAutocast, IsInheritedByNestedCallsAndCanBeDisabled) {
  on_first([](Worker& worker) {
    for (const bool fails : {false, true, false}) {
      {
        AutocastScope scope;
        scope.enter(to());
        if (fails) {
          EXPECT_EQ(error_of([&] { worker.rpc_sync(1, kNested, true); }).kind(), ErrorKind::kRemoteFailure);
        } else {
          EXPECT_THAT(worker.rpc_sync(1, kNested, false),
                      ElementsAre("BFloat16", "off", "Float", "BFloat16"));
        }
        EXPECT_EQ(mode_here(), "BFloat16");
      }
      // The handler's thread is as it was: its next calls see nothing of the earlier ones.
      EXPECT_EQ(worker.rpc_sync(1, kMode), "off");
      EXPECT_THAT(worker.rpc_sync(1, kNested, false), ElementsAre("off", "off", "Float", "off"));
      EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    }
  });
}

TEST(RemoteAutocast, DoesNotCacheCastsInHandlersWhichAllThreadsOfAProcessWouldUse) {
  on_first([](Worker& worker) {
    AutocastScope scope;
    scope.enter(to());
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    EXPECT_FALSE(worker.rpc_sync(1, kCaches));
    EXPECT_EQ(worker.rpc_sync(1, kMode), "BFloat16");
  });
}

TEST(RemoteAutocast, FollowsCoroutinesAndContinuations) {
  on_first([](Worker& worker) {
    AutocastScope scope;
    scope.enter(to());
    std::vector<Future<std::vector<std::string>>> all;
    for (int i = 0; i < 4; ++i) all.push_back(worker.rpc_async(1, kSlow));
    AutocastScope off;
    off.enter({});
    EXPECT_THAT(worker.rpc_sync(1, kSlow), ::testing::Each(std::string("off")));
    EXPECT_EQ(worker.rpc_sync(1, kContinued), "off");
    for (auto& one : all) EXPECT_THAT(one.wait(), ::testing::Each(std::string("BFloat16")));
    AutocastScope on;
    on.enter(to(at::kFloat));
    EXPECT_EQ(worker.rpc_sync(1, kContinued), "Float");
  });
}

TEST(AutocastHeader, IsEmptyWithoutAutocastAndLeavesOutUnknownDevices) {
  EXPECT_TRUE(encode_autocast().empty());
  AutocastScope scope;
  scope.enter(to());
  const Autocast read = decode_autocast(encode_autocast());
  ASSERT_EQ(read.modes.size(), 2);
  EXPECT_EQ(read.modes[0].device, c10::DeviceType::CPU);
  EXPECT_EQ(read.modes[0].dtype, at::kBFloat16);
  AutocastHeader header{{{"cuda", at::kHalf}, {"abacus", at::kHalf}, {"cpu", at::kInt}}, false};
  const Autocast other = decode_autocast(wire::to_payload(header).value);
  ASSERT_EQ(other.modes.size(), 1);
  EXPECT_EQ(other.modes[0].device, c10::DeviceType::CUDA);
  EXPECT_FALSE(other.cache);
#if !TORCHSPAN_LIBTORCH_AT_LEAST(2, 0)
  header = {{{"cpu", at::kHalf}}, true};
  EXPECT_EQ(error_of([&] { decode_autocast(wire::to_payload(header).value); }).kind(),
            ErrorKind::kUnsupported);
#endif
  Bytes bytes = encode_autocast();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(error_of([&] { decode_autocast(BytesView(bytes).first(size)); }).kind(), ErrorKind::kInvalid);
  }
}

}  // namespace
}  // namespace torchspan::rpc::autocast_test
