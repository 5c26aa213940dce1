#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <torchspan/detail/device/copies.h>
#include <torchspan/detail/device/streams.h>

#include "tests/support/stand_in_device.h"

namespace torchspan::device::streams_test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torchspan::testing::stand_in;
using torchspan::testing::StandInStreams;

class DeviceStreams : public ::testing::Test {
 protected:
  void SetUp() override { device_.reset(); }
  ~DeviceStreams() override {
    EXPECT_THAT(device_.take_races(), IsEmpty());
    device_.reset();
  }
  static at::Tensor on_device(double value, std::int64_t elements = 8) {
    return at::full({elements}, value, at::kDouble).to(stand_in(0));
  }
  StandInStreams& device_ = StandInStreams::get();
};

TEST_F(DeviceStreams, KnowWhichDevicesHaveThem) {
  EXPECT_TRUE(has_streams());
  EXPECT_TRUE(has_streams(stand_in(1)));
  EXPECT_FALSE(has_streams(c10::kCPU));
  EXPECT_FALSE(has_streams(c10::kMeta));
  EXPECT_TRUE(Streams::current_side().empty());
}

TEST_F(DeviceStreams, ScopesRestoreThem) {
  const c10::Stream side = stream_from_pool(stand_in(0)), other = stream_from_pool(stand_in(1));
  {
    StreamsScope scope;
    scope.enter(side);
    EXPECT_EQ(current_stream(stand_in(0)), side);
    const Streams seen = Streams::current_side();
    ASSERT_NE(seen.of(stand_in(0)), nullptr);
    EXPECT_EQ(seen.of(stand_in(1)), nullptr);
    {
      const SideStreamsScope defaults{Streams()};
      EXPECT_TRUE(Streams::current_side().empty());
      StreamsScope left;
      left.enter(other);
      const SideStreamsScope again(seen);
      EXPECT_EQ(current_stream(stand_in(0)), side);
      EXPECT_EQ(current_stream(stand_in(1)), default_stream(stand_in(1)));
    }
    EXPECT_EQ(current_stream(stand_in(0)), side);
  }
  EXPECT_TRUE(Streams::current_side().empty());
}

TEST_F(DeviceStreams, MarksOrderOtherStreamsAndTellWhetherTheyAreReached) {
  device_.reset(/*polls=*/1);
  const auto events = std::make_shared<EventPool>();
  const c10::Stream side = stream_from_pool(stand_in(0));
  const at::Tensor x = on_device(1);
  const std::size_t made = device_.events_made();
  for (int i = 0; i < 3; ++i) {
    x.add_(1);
    const Mark mark(current_stream(stand_in(0)), events);
    mark.hold_back(side);
    const c10::StreamGuard guard(side);
    const at::Tensor y = x * 1;
    EXPECT_FALSE(mark.reached());
    EXPECT_TRUE(mark.reached());
    side.synchronize();
  }
  EXPECT_EQ(device_.events_made() - made, 1);
}

/// CUDA would make a context on the current device of the thread, which is device 0 here.
TEST_F(DeviceStreams, UseEventsOnTheirDevicesOnly) {
  const c10::Stream earlier = stream_from_pool(stand_in(1)), later = stream_from_pool(stand_in(1));
  order_after(later, earlier);
  {
    const Mark mark(earlier, std::make_shared<EventPool>());
    mark.hold_back(later);
    mark.hold_back(stream_from_pool(stand_in(0)));
    mark.wait();
  }
  EXPECT_EQ(device_.stray_event_calls(), 0u);
}

TEST_F(DeviceStreams, AWaitForAMarkEndsBeforeLaterWorkOfItsStream) {
  device_.reset(/*polls=*/1000);
  const at::Tensor x = on_device(1);
  const Mark mark(current_stream(stand_in(0)), std::make_shared<EventPool>());
  x.add_(1);
  const std::size_t waits = device_.host_waits();
  mark.wait();
  EXPECT_EQ(device_.host_waits(), waits) << "the copy to the device was waited for already";
  const Mark second(current_stream(stand_in(0)), std::make_shared<EventPool>());
  x.add_(1);
  second.wait();
  EXPECT_EQ(device_.host_waits(), waits + 1);
  EXPECT_TRUE(second.reached());
  EXPECT_FALSE(device_.query({0, 0})) << "later work was waited for";
}

TEST_F(DeviceStreams, CopiesToTheHostHaveTheValuesOfTheMoment) {
  CopyStreams streams;
  for (const std::int64_t elements : {8, 1 << 15}) {
    device_.reset(/*polls=*/3);
    PendingCopies copies;
    const at::Tensor x = on_device(4, elements);
    const std::size_t waits = device_.host_waits();
    const at::Tensor host = streams.to_host(x, copies),
                     view = streams.to_host(x.expand({2, elements}), copies);
    EXPECT_TRUE(view.isnan().all().item<bool>());
    x.zero_();
    int polls = 0;
    while (!copies.complete()) ++polls;
    EXPECT_GE(polls, 3);
    EXPECT_EQ(device_.host_waits(), waits);
    EXPECT_TRUE(at::equal(host, at::full({elements}, 4.0, at::kDouble)));
    EXPECT_TRUE(at::equal(view, at::full({2, elements}, 4.0, at::kDouble)));
  }
}

TEST_F(DeviceStreams, CopiesThatAreDroppedAreWaitedFor) {
  device_.reset(/*polls=*/1 << 20);
  CopyStreams streams;
  {
    PendingCopies copies;
    static_cast<void>(streams.to_host(on_device(4, 1 << 15), copies));
  }
  EXPECT_THAT(device_.take_races(), IsEmpty());  // the host memory lived until the copy had run
}

TEST_F(DeviceStreams, WaitingForCopiesOfAFailedDeviceThrows) {
  device_.reset(/*polls=*/1);
  CopyStreams streams;
  PendingCopies copies, others;
  const at::Tensor host = streams.to_host(on_device(4), copies);
  copies.wait();
  EXPECT_TRUE(at::equal(host, at::full({8}, 4.0, at::kDouble)));
  const at::Tensor never = streams.to_host(on_device(5), others);
  device_.fail();
  EXPECT_THROW(others.wait(), std::runtime_error);
  device_.reset();
}

TEST_F(DeviceStreams, CopiesToADeviceDoNotWaitForItsOtherWork) {
  CopyStreams streams;
  const at::Tensor x = on_device(1);
  x.add_(1);
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(current_stream(stand_in(0)));
  device_.reset();
  x.add_(1);
  const at::Tensor y = streams.to_device(at::ones({8}, at::kDouble), stand_in(0));
  EXPECT_FALSE(device_.query({0, 0})) << "the default stream's work was waited for";
  EXPECT_TRUE(at::equal((y + x).cpu(), at::full({8}, 4.0, at::kDouble)));
}

}  // namespace
}  // namespace torchspan::device::streams_test
