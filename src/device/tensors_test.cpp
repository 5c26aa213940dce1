#include "device/api/tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include "tests/support/stand_in_device.h"

namespace torchspan::device::tensors_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using torchspan::testing::stand_in;
using torchspan::testing::StandInStreams;

TEST(DeviceNumbers, AreReadWithOneWaitForAllDevices) {
  StandInStreams& device = StandInStreams::get();
  const auto number = [](double value, at::ScalarType dtype) { return at::full({}, value, dtype); };
  const std::vector<at::Tensor> tensors{number(1.5, at::kFloat).to(stand_in(1)), number(2.5, at::kDouble),
                                        number(0.1, at::kDouble).to(stand_in(0)),
                                        number(4.5, at::kHalf).to(stand_in(0)),
                                        number(5.5, at::kFloat).reshape({1, 1}).to(stand_in(1))};
  device.reset();
  EXPECT_THAT(read_numbers(tensors), ElementsAre(1.5, 2.5, 0.1, 4.5, 5.5));
  EXPECT_EQ(device.host_waits(), 1u);
  EXPECT_THAT(read_numbers({}), IsEmpty());
  EXPECT_THAT(device.take_races(), IsEmpty());
}

}  // namespace

}  // namespace torchspan::device::tensors_test
