#include "device/api/copy_rings.h"

#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include "tests/support/stand_in_device.h"

namespace torchspan::device::copy_rings_test {
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

using ::testing::IsEmpty;
using torchspan::testing::stand_in;
using torchspan::testing::StandInStreams;

class DownloadRings : public ::testing::Test {
 protected:
  void SetUp() override { device_.reset(); }
  ~DownloadRings() override {
    EXPECT_THAT(device_.take_races(), IsEmpty());
    device_.reset();
  }
  /// The bytes of a tensor on the device, in parts.
  static at::Tensor on_device(std::int64_t count) { return at::arange(count, at::kByte).to(stand_in(0)); }
  /// Makes the ring's stream wait for what the current stream did.
  static void follow(const DownloadRing& ring) { order_after(ring.stream(), current_stream(stand_in(0))); }
  static std::vector<int> values(const Segment& part) {
    std::vector<int> all;
    for (std::size_t i = 0; i < part.size; ++i) all.push_back(static_cast<int>(part.data[i]));
    return all;
  }
  StandInStreams& device_ = StandInStreams::get();
};

TEST_F(DownloadRings, TheTensorArrivesWhateverTheParts) {
  const at::Tensor x = at::arange(1000, at::kDouble).view({10, 100});
  for (const std::size_t part : {64, 1000, 3999, 4000, 8000, 100000}) {
    DownloadRing ring(stand_in(0), part);
    const at::Tensor there = x.to(stand_in(0));
    follow(ring);
    const std::size_t total = there.nbytes(), waits = device_.host_waits();
    std::vector<std::byte> got;
    for (std::size_t from = 0; got.size() < total;) {
      while (from < total && ring.fill(there, from, std::min(part, total - from)))
        from += std::min(part, total - from);
      const std::optional<Segment> one = ring.take();
      ASSERT_TRUE(one);
      got.insert(got.end(), one->data, one->data + one->size);
    }
    EXPECT_EQ(std::memcmp(got.data(), x.data_ptr(), total), 0) << "parts of " << part;
    EXPECT_FALSE(ring.ready());
    EXPECT_EQ(device_.host_waits(), waits) << "the host waited for a device";
  }
}

/// The next copy begins while the part before it is still being sent, and never in a buffer that is being sent.
TEST_F(DownloadRings, TheDeviceFillsOneBufferWhileTheOtherIsSent) {
  device_.reset(/*polls=*/1);
  DownloadRing ring(stand_in(0), 4);
  const at::Tensor bytes = on_device(20);
  follow(ring);
  const std::size_t waits = device_.host_waits();
  ASSERT_TRUE(ring.fill(bytes, 0, 4));
  ASSERT_TRUE(ring.fill(bytes, 4, 4));
  EXPECT_FALSE(ring.fill(bytes, 8, 4)) << "both buffers are in use";
  EXPECT_FALSE(ring.take()) << "the device has not come to the copy";
  std::optional<Segment> first = ring.take();
  ASSERT_TRUE(first);
  EXPECT_FALSE(ring.fill(bytes, 8, 4)) << "the first part is being sent";
  EXPECT_EQ(values(*first), (std::vector{0, 1, 2, 3}));
  first.reset();
  ASSERT_TRUE(ring.fill(bytes, 8, 4)) << "while the second part waits";
  while (!ring.ready()) {
  }
  const std::optional<Segment> second = ring.take();
  while (!ring.ready()) {
  }
  const std::optional<Segment> third = ring.take();
  EXPECT_EQ(values(*second), (std::vector{4, 5, 6, 7}));
  EXPECT_EQ(values(*third), (std::vector{8, 9, 10, 11}));
  EXPECT_EQ(device_.host_waits(), waits);
}

TEST_F(DownloadRings, DiscardedPartsLeaveNothingBehind) {
  device_.reset(/*polls=*/100);
  DownloadRing ring(stand_in(0), 4);
  const at::Tensor bytes = on_device(20);
  follow(ring);
  ASSERT_TRUE(ring.fill(bytes, 0, 4));
  ASSERT_TRUE(ring.fill(bytes, 4, 4));
  ring.discard();
  EXPECT_FALSE(ring.ready());
  ASSERT_TRUE(ring.fill(bytes, 16, 4));
  while (!ring.ready()) {
  }
  EXPECT_EQ(values(*ring.take()), (std::vector{16, 17, 18, 19}));
}

/// Of two parts, one is with the transport and the other is being written by the device.
TEST_F(DownloadRings, BuffersOutliveTheirRing) {
  std::optional<Segment> part;
  {
    DownloadRing ring(stand_in(0), 4);
    const at::Tensor bytes = on_device(8);
    follow(ring);
    keep_memory_for(bytes, ring.stream());
    ASSERT_TRUE(ring.fill(bytes, 0, 4));
    part = ring.take();
    ASSERT_TRUE(ring.fill(bytes, 4, 4));
  }
  ASSERT_TRUE(part);
  EXPECT_EQ(values(*part), (std::vector{0, 1, 2, 3}));
}

}  // namespace

}  // namespace torchspan::device::copy_rings_test
