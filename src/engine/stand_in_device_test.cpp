// The simulated streams of tests/support/stand_in_device.h, with which other suites test ours.
#include "tests/support/stand_in_device.h"

#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

namespace torchspan::engine::stand_in_device_test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using torchspan::testing::stand_in;
using torchspan::testing::StandInStreams;

c10::Stream new_stream(int device = 0) {
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)
      ->getStreamFromGlobalPool(stand_in(device));
}
void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(earlier);
  event.block(later);
}
bool is_nan(const at::Tensor& tensor) { return tensor.cpu().isnan().all().item<bool>(); }

class StandInDevice : public ::testing::Test {
 protected:
  void SetUp() override { streams_.reset(); }
  StandInStreams& streams_ = StandInStreams::get();
};

TEST_F(StandInDevice, ComputesWhatTheCpuComputes) {
  const at::Tensor a = at::randn({3, 4}), b = at::randn({4, 5});
  const at::Tensor x = a.to(stand_in(0)), y = b.to(stand_in(0));
  EXPECT_TRUE(at::equal(at::matmul(x, y).relu_().cpu(), at::matmul(a, b).relu_()));
  EXPECT_TRUE(at::equal(x.t().contiguous().cpu(), a.t()));
  EXPECT_TRUE(at::equal(at::cat({x, x}, 1).narrow(1, 2, 4).cpu(), at::cat({a, a}, 1).narrow(1, 2, 4)));
  EXPECT_TRUE(at::equal(x.to(stand_in(1)).add_(1).cpu(), a + 1));
  const at::Tensor sum = at::empty({0}, x.options());
  at::add_out(const_cast<at::Tensor&>(sum), x, x);
  EXPECT_TRUE(at::equal(sum.cpu(), a + a));
  EXPECT_THAT(streams_.take_races(), IsEmpty());
}

TEST_F(StandInDevice, ReportsAReadThatWaitsForNoEventAndReadsNan) {
  const at::Tensor x = at::ones({4}).to(stand_in(0));
  const c10::Stream side = new_stream();
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x + 1;
  }
  EXPECT_TRUE(is_nan(y * 2));
  EXPECT_THAT(streams_.take_races(), Contains(HasSubstr("'aten::mul' on stream 0 of device 0 reads what "
                                                        "'aten::add' writes on stream")));
  order(side, c10::Stream(c10::Stream::DEFAULT, stand_in(0)));
  EXPECT_TRUE(at::equal((y * 2).cpu(), at::full({4}, 4.0)));
  y.add_(1);
  EXPECT_THAT(streams_.take_races(), IsEmpty());
}

TEST_F(StandInDevice, ReportsAWriteOverWhatAnotherStreamReads) {
  const at::Tensor x = at::ones({4}).to(stand_in(0));
  const c10::Stream side = new_stream();
  at::Tensor y;
  {
    const c10::StreamGuard guard(side);
    y = x + 1;
  }
  x.zero_();
  EXPECT_THAT(streams_.take_races(), Contains(HasSubstr("writes what 'aten::add' reads")));
  x.narrow(0, 0, 2).zero_();  // the first write has been reported; this one follows it
  EXPECT_THAT(streams_.take_races(), IsEmpty());
  side.synchronize();
}

TEST_F(StandInDevice, ComparesBytesNotWholeStorages) {
  const at::Tensor x = at::ones({8}).to(stand_in(0));
  const c10::Stream side = new_stream();
  x.narrow(0, 0, 4).add_(1);
  {
    const c10::StreamGuard guard(side);
    x.narrow(0, 4, 4).add_(1);
  }
  EXPECT_THAT(streams_.take_races(), IsEmpty());
  side.synchronize();
}

TEST_F(StandInDevice, ReportsMemoryFreedWhileAnotherStreamUsesIt) {
  const c10::Stream side = new_stream();
  for (const bool records : {false, true}) {
    at::Tensor x = at::ones({4}).to(stand_in(0)), y;
    {
      const c10::StreamGuard guard(side);
      y = x + 1;
    }
    if (records)
      c10::impl::getDeviceGuardImpl(side.device_type())->recordDataPtrOnStream(x.storage().data_ptr(), side);
    x.reset();
    EXPECT_THAT(streams_.take_races(), SizeIs(records ? 0 : 1));
    side.synchronize();
  }
}

TEST_F(StandInDevice, RunsAsynchronousCopiesLate) {
  streams_.reset(/*polls=*/2);
  const at::Tensor x = at::ones({4}).to(stand_in(0));
  at::Tensor host = at::zeros({4});
  host.copy_(x, /*non_blocking=*/true);
  EXPECT_TRUE(host.isnan().all().item<bool>());
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(c10::Stream(c10::Stream::DEFAULT, stand_in(0)));
  EXPECT_FALSE(event.query());
  EXPECT_FALSE(event.query());
  EXPECT_TRUE(event.query());
  EXPECT_TRUE(at::equal(host, at::ones({4})));

  const at::Tensor y = at::empty({4}, x.options());
  y.copy_(host, true);
  host.fill_(7);  // the copy has not read it yet
  EXPECT_TRUE(at::equal(y.cpu(), at::full({4}, 7.0)));
  y.copy_(at::ones({4}), true);
  c10::Stream(c10::Stream::DEFAULT, stand_in(0)).synchronize();
  EXPECT_THAT(streams_.take_races(), Contains(HasSubstr("was freed before the copy ran")));
}

TEST_F(StandInDevice, CountsWaitsOfTheHost) {
  const at::Tensor x = at::ones({4}).to(stand_in(0));
  const std::size_t before = streams_.host_waits();
  const at::Tensor y = (x + x).sum();
  EXPECT_EQ(streams_.host_waits(), before);
  EXPECT_EQ(y.item<float>(), 8);
  EXPECT_EQ(streams_.host_waits(), before + 1);
}

}  // namespace
}  // namespace torchspan::engine::stand_in_device_test
