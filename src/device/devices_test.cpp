#include "device/api/devices.h"

#include <gmock/gmock.h>

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

TEST(Presence, CountsTheDevicesOfThisProcess) {
  EXPECT_EQ(why_absent(stand_in(1)), "");
  EXPECT_THAT(why_absent(stand_in(2)), HasSubstr("this process has 2 privateuseone devices"));
  EXPECT_EQ(why_absent(c10::Device("xpu:0")), "this process has no xpu devices");
}

}  // namespace

}  // namespace torchspan::device::devices_test
