#include "device/upload_ring.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include "tests/support/stand_in_device.h"

namespace torchspan::device::upload_ring_test {
namespace {

using ::testing::IsEmpty;
using torchspan::testing::stand_in;
using torchspan::testing::StandInStreams;

class UploadRings : public ::testing::Test {
 protected:
  void SetUp() override { device_.reset(); }
  ~UploadRings() override {
    EXPECT_THAT(device_.take_races(), IsEmpty());
    device_.reset();
  }
  StandInStreams& device_ = StandInStreams::get();
};

/// The device copies a buffer late: a buffer that is filled again too early changes what arrives.
TEST_F(UploadRings, TheTensorArrivesWhateverTheChunks) {
  const c10::Stream stream = stream_from_pool(stand_in(0));
  for (const std::size_t chunk : {1, 7, 64, 3999, 4000, 8000, 100000}) {
    // The device takes its time for each copy, so small chunks are of a small tensor.
    const at::Tensor x = at::arange(chunk < 64 ? 40 : 1000, at::kDouble).view({10, -1});
    UploadRing ring(stand_in(0), chunk);
    for (const at::Tensor& tensor : {x, x.t(), x.to(at::kHalf), x.view({-1})}) {
      if (chunk == 1 && tensor.is_same(x)) continue;
      const at::Tensor copy = ring.upload(tensor, stream);
      EXPECT_EQ(copy.strides(), tensor.strides());
      EXPECT_EQ(copy.device(), stand_in(0));
      EXPECT_TRUE(at::equal(copy.cpu(), tensor)) << "chunk " << chunk;
    }
  }
}

TEST_F(UploadRings, TheCopyFollowsEarlierWorkOfTheStreamThatOwnsItsMemory) {
  const c10::Stream stream = stream_from_pool(stand_in(0));
  UploadRing ring(stand_in(0), 64);
  StreamsScope scope;
  scope.enter(stream);
  const at::Tensor y = ring.upload(at::ones({100}), stream) + 1;
  EXPECT_TRUE(at::equal(y.cpu(), at::full({100}, 2.0)));
}

}  // namespace
}  // namespace torchspan::device::upload_ring_test
