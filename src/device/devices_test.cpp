#include "device/api/devices.h"

#include <gmock/gmock.h>

#include <ATen/Context.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include "tests/support/errors.h"
#include "tests/support/stand_in_device.h"

namespace torchspan::device::devices_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torchspan::testing::stand_in;

TEST(Presence, SaysWhyADeviceIsAbsentAndWhatToDo) {
  const c10::Device cuda("cuda:3"), current("cuda");
  EXPECT_THAT(why_absent(cuda, {.supported = false}),
              AllOf(HasSubstr("no cuda devices"), HasSubstr("CPU half"), HasSubstr("TORCHSPAN_CUDA=ON")));
  for (const c10::Device device : {cuda, current}) {
    EXPECT_THAT(why_absent(device, {.supported = true, .count = 0}),
                AllOf(HasSubstr("no cuda devices"), HasSubstr("nvidia-smi")));
  }
  EXPECT_THAT(why_absent(cuda, {.supported = true, .count = 3}),
              AllOf(HasSubstr("has 3 cuda devices"), HasSubstr("local rank")));
  EXPECT_THAT(why_absent(cuda, {.supported = true, .count = 1}), HasSubstr("has 1 cuda device:"));
  EXPECT_EQ(why_absent(cuda, {.supported = true, .count = 4}), "");
  EXPECT_EQ(why_absent(current, {.supported = true, .count = 1}), "");
  EXPECT_EQ(why_absent(c10::kMeta), "a meta tensor has no data");
  EXPECT_EQ(why_absent(c10::kCPU), "");
}

TEST(Devices, HaveNoOtherNumberThanTheirText) {
  EXPECT_EQ(parse("cuda:1"), c10::Device(c10::kCUDA, 1));
  EXPECT_EQ(parse("cpu"), c10::Device(c10::kCPU));
  for (const char* text : {"cuda:256", "cuda:200", "cuda:01", "cuda:-1", "cuda:", "gpu", ""}) {
    EXPECT_THAT(torchspan::testing::error_of([&] { parse(text); }).message(), HasSubstr("is not a device"))
        << text;
  }
}

TEST(Presence, CountsTheDevicesOfThisProcess) {
  EXPECT_EQ(why_absent(stand_in(1)), "");
  EXPECT_THAT(why_absent(stand_in(2)), HasSubstr("this process has 2 privateuseone devices"));
  EXPECT_EQ(why_absent(c10::Device("xpu:0")), "this process has no xpu devices");
}

/// torch's fake tensors, which DTensor uses, install such a guard in a process without CUDA devices: it claims eight.
TEST(Presence, DoesNotCountFakeDevices) {
  if (at::globalContext().hasCUDA()) GTEST_SKIP() << "this process has CUDA devices";
  const c10::impl::FakeGuardImpl<c10::kCUDA> fake;
  auto& guard = c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::kCUDA)];
  const auto* before = guard.exchange(&fake);
  EXPECT_GT(fake.deviceCount(), 0);
  EXPECT_EQ(count_devices(c10::kCUDA).count, 0);
  EXPECT_EQ(default_generators().size(), 1u) << "that of the CPU";
  guard.store(before);
}

}  // namespace

}  // namespace torchspan::device::devices_test
