#include "device/api/offload.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "tests/support/stand_in_device.h"

namespace torchspan::device::offload_test {
namespace {

using ::testing::IsEmpty;
using torchspan::testing::stand_in;
using torchspan::testing::StandInStreams;

class Offloads : public ::testing::Test {
 protected:
  void SetUp() override { device_.reset(/*polls=*/3); }
  ~Offloads() override {
    device_.finish();
    EXPECT_THAT(device_.take_races(), IsEmpty());
    device_.reset();
  }
  static at::Tensor on_device(double value, int device = 0) {
    return at::full({3, 5}, value, at::kDouble).to(stand_in(device));
  }
  /// Device memory whose end the test observes.
  static c10::weak_intrusive_ptr<c10::StorageImpl> weak(const at::Tensor& tensor) {
    return tensor.storage().getWeakStorageImpl();
  }
  StandInStreams& device_ = StandInStreams::get();
};

/// The copies run late: one that another stream does not wait for gives NaN and a race.
TEST_F(Offloads, ReturnTheValuesInAnyOrder) {
  for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6, 7, 8}) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Offloader offloader;
    std::vector<std::optional<OffloadedTensor>> away;
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = on_device(i, i % 2).mul_(10);  // work that the copy must follow
      away.emplace_back(offloader.offload(i % 3 == 0 ? x.t() : x));
    }
    std::vector<int> order{0, 1, 2, 3, 4, 5};
    std::shuffle(order.begin(), order.end(), random);
    for (std::size_t next = 0; next < order.size(); ++next) {
      const int i = order[next];
      if (next + 1 < order.size() && random() % 2 == 0)
        away[static_cast<std::size_t>(order[next + 1])]->prefetch();
      at::Tensor back = away[static_cast<std::size_t>(i)]->take();
      EXPECT_EQ(back.device(), stand_in(i % 2));
      EXPECT_EQ(back.sizes(), (i % 3 == 0 ? at::IntArrayRef{5, 3} : at::IntArrayRef{3, 5}));
      const at::Tensor sum = back + 1;  // of the current stream
      back = at::Tensor();
      EXPECT_TRUE(at::equal(sum.cpu(), at::full(sum.sizes(), 10.0 * i + 1, at::kDouble))) << "tensor " << i;
      away[static_cast<std::size_t>(i)].reset();
    }
  }
}

TEST_F(Offloads, FreeTheDevicesMemory) {
  device_.reset(/*polls=*/1000);
  Offloader offloader;
  std::vector<OffloadedTensor> away;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
  for (int i = 0; i < 8; ++i) {
    at::Tensor x = on_device(i);
    memory.push_back(weak(x));
    away.push_back(offloader.offload(std::move(x)));
    int alive = 0;
    for (const auto& each : memory) alive += each.use_count() > 0 ? 1 : 0;
    EXPECT_LE(alive, 2) << "after tensor " << i;
  }
  EXPECT_GE(device_.host_waits(), 2u) << "the allocator reuses memory when its copy is known to be complete";
}

TEST_F(Offloads, WaitForTheFirstPendingCopyOnly) {
  device_.reset(/*polls=*/1000);
  Offloader offloader;
  std::vector<at::Tensor> tensors{on_device(0), on_device(1), on_device(2)};
  std::vector<OffloadedTensor> away;
  std::vector<Mark> computed;
  for (at::Tensor& tensor : tensors) {
    tensor.add_(1);
    computed.emplace_back(current_stream(stand_in(0)), std::make_shared<EventPool>());
    away.push_back(offloader.offload(std::move(tensor)));
  }
  EXPECT_EQ(device_.host_waits(), 4u) << "one besides those for the tensors' way to the device";
  EXPECT_TRUE(computed[0].reached());
  EXPECT_FALSE(computed[1].reached()) << "the second copy was waited for";
  EXPECT_FALSE(device_.query({0, 0})) << "all work of the caller's stream was waited for";
}

TEST_F(Offloads, DoNotWaitOnTheHostForTensorsThatComeBackSoon) {
  Offloader offloader;
  at::Tensor x = on_device(3), y = on_device(4);
  const void* const memory = x.data_ptr();
  device_.reset();
  OffloadedTensor first = offloader.offload(std::move(x)), second = offloader.offload(std::move(y));
  const at::Tensor back = first.take();
  EXPECT_EQ(back.data_ptr(), memory) << "it is still on the device";
  const at::Tensor sum = back + second.take();
  EXPECT_EQ(device_.host_waits(), 0u);
  EXPECT_TRUE(at::equal(sum.cpu(), at::full({3, 5}, 7.0, at::kDouble)));
}

TEST_F(Offloads, FollowTheStreamsOfTheirCallers) {
  Offloader offloader;
  const c10::Stream side = stream_from_pool(stand_in(0));
  std::vector<OffloadedTensor> away;
  {
    const c10::StreamGuard guard(side);
    for (int i = 0; i < 4; ++i) away.push_back(offloader.offload(on_device(i) * 2));
  }
  const c10::StreamGuard other(stream_from_pool(stand_in(0)));
  for (std::size_t i = 0; i < 4; ++i)  // the last ones are still on the device
    EXPECT_TRUE(at::equal((away[i].take() + 0).cpu(), at::full({3, 5}, 2.0 * i, at::kDouble)));
}

/// A step that fails destroys what it holds at any point.
TEST_F(Offloads, WaitForTheirCopiesWhenTheyAreDropped) {
  std::optional<Offloader> offloader(std::in_place);
  { const OffloadedTensor dropped = offloader->offload(on_device(1)); }
  std::vector<OffloadedTensor> away;
  for (int i = 0; i < 5; ++i) away.push_back(offloader->offload(on_device(i)));
  away[0].prefetch();
  away[4].prefetch();
  const at::Tensor taken = away[1].take();
  offloader.reset();
  EXPECT_TRUE(at::equal((away[2].take() + 0).cpu(), at::full({3, 5}, 2.0, at::kDouble)));
  away.clear();
  EXPECT_TRUE(at::equal(taken.cpu(), at::full({3, 5}, 1.0, at::kDouble)));
}

TEST_F(Offloads, WaitForTheirWayBackWhenTheyAreDropped) {
  Offloader offloader;
  std::vector<OffloadedTensor> away;
  for (int i = 0; i < 3; ++i) away.push_back(offloader.offload(on_device(i)));
  away[0].prefetch();
  away.clear();
}

TEST_F(Offloads, AreNotMistakenForDroppedOnes) {
  Offloader offloader;
  { const OffloadedTensor dropped = offloader.offload(on_device(1)); }
  OffloadedTensor next = offloader.offload(on_device(2));
  EXPECT_TRUE(at::equal((next.take() + 0).cpu(), at::full({3, 5}, 2.0, at::kDouble)));
}

}  // namespace
}  // namespace torchspan::device::offload_test
