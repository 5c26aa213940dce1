// Large tensors in parts in an area of device memory that the peer maps, without workers: how much of the area they use, what
// goes through host memory instead, lost parts, and receivers without room.
#include <deque>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include <ATen/ATen.h>

#include "device/api/tensors.h"
#include "rpc/device_memory/received_memory.h"
#include "rpc/tensor_parts/incoming_parts.h"
#include "rpc/tensor_parts/outgoing_parts.h"
#include "tests/support/errors.h"
#include "tests/support/stand_in_device.h"
#include "tests/support/stand_in_runtime.h"

namespace torchspan::rpc::shared_buffers_test {
namespace {

using namespace torchspan::testing;  // NOLINT(google-build-using-namespace)
using ::testing::IsEmpty;

constexpr PeerId kPeer{1, 0};

/// Delivers parts at once to a table that copies them out of an area, and returns the area's parts when the test wants.
class LendingChannel final : public net::Channel {
 public:
  LendingChannel(IncomingParts& peer, std::shared_ptr<LentArea> area) : peer_(peer), area_(std::move(area)) {}

  void send(BytesView header, std::span<const Segment> segments) override {
    if (broken) throw Error(ErrorKind::kDisconnected, "broken, as the test wants");
    const wire::FrameView frame = wire::decode_frame(header, {1, 1, kPartsInDeviceMemory});
    wire::Payload payload;
    payload.value.assign(frame.value.begin(), frame.value.end());
    const auto part = wire::from_payload<TensorPart>(payload);
    const auto* blob = frame.blob(kDeviceMemoryBlob);
    EXPECT_EQ(frame.header.features, blob == nullptr ? 0 : kPartsInDeviceMemory);
    if (blob == nullptr) {
      std::vector<Buffer> arrived;
      for (const Segment& segment : segments) {
        arrived.push_back(allocate_buffer(segment.size));
        std::memcpy(arrived.back().data, segment.data, segment.size);
        ++through_host;
      }
      return peer_.receive(this, part, arrived);
    }
    EXPECT_TRUE(segments.empty());
    payload.value.assign(blob->bytes.begin(), blob->bytes.end());
    const SharedPlace place = wire::from_payload<SharedPlaces>(payload).all.at(0);
    const Buffer arrived{area_->data() + place.offset, place.bytes, area_};
    ++lent;
    if (lost) return leases.push_back(place.lease);
    peer_.receive(this, part, {arrived}, stand_in(1));
    leases.push_back(place.lease);
  }
  void return_one() {
    area_->returned(leases.front());
    leases.pop_front();
  }
  std::size_t unsent_bytes() const override { return 0; }
  void close() override {}
  std::string peer() const override { return "lending"; }

  bool broken = false, lost = false;
  std::size_t lent = 0, through_host = 0;  ///< parts
  std::deque<std::uint64_t> leases;        ///< that are to be returned

 private:
  IncomingParts& peer_;
  const std::shared_ptr<LentArea> area_;
};

/// Parts in an area, through which four parts would go at a time, if all of it were used.
class PartsInDeviceMemory : public ::testing::Test {
 protected:
  static constexpr std::size_t kShared = std::size_t{64} << 10;
  void SetUp() override { device_.reset(); }
  void TearDown() override {
    EXPECT_THAT(device_.take_races(), IsEmpty());
    device_.reset();
  }
  SplitTensorPtr split(const at::Tensor& tensor) {
    return sender_.split(kPeer, tensor, {.instance = 7, .version = 1}, SharedArea{area_, 3, &counter_});
  }
  /// `parts` parts and a byte.
  static at::Tensor values(std::int64_t parts) {
    return at::arange(parts * static_cast<std::int64_t>(kShared) + 1, at::kByte).to(stand_in(0));
  }
  std::shared_ptr<LendingChannel> connect() { return std::make_shared<LendingChannel>(receiver_, area_); }
  void send_all(SplitTensor& split, const std::shared_ptr<LendingChannel>& channel) {
    for (int i = 0; i < 1000 && !split.done(); ++i) {
      split.advance(channel);
      if (!channel->leases.empty()) channel->return_one();
    }
    ASSERT_TRUE(split.done());
  }
  /// What a message with the tensor gets, on the device if `stays`.
  void expect_arrived(const net::Channel* channel, SplitTensor& split, const at::Tensor& tensor, bool stays) {
    std::vector<Buffer> segments;
    std::vector<wire::DeviceSegment> on_device;
    receiver_.insert(channel, wire::to_payload(SplitPlaces{{{0, split.number()}}}).value,
                     {segments, on_device});
    split.message_sent();
    ASSERT_EQ(on_device.size(), stays ? 1 : 0);
    const at::Tensor plain = tensor.cpu();
    ASSERT_EQ(segments.at(0).size, plain.nbytes());
    if (stays) {
      EXPECT_EQ(on_device[0].device, stand_in(1));
      const at::Tensor whole = std::move(*std::static_pointer_cast<at::Tensor>(segments[0].owner));
      EXPECT_EQ(whole.device(), stand_in(1));
      EXPECT_TRUE(at::equal(whole.cpu(), plain));
    } else {
      EXPECT_EQ(std::memcmp(segments[0].data, plain.data_ptr(), plain.nbytes()), 0);
    }
  }

  StandInStreams& device_ = StandInStreams::get();
  const std::shared_ptr<StandInRuntime> runtime_ = std::make_shared<StandInRuntime>();
  const std::shared_ptr<LentArea> area_ =
      std::make_shared<LentArea>(runtime_->allocate(stand_in(0), 4 * kShared), 4 * kShared);
  Counter counter_;
  const net::Channel* ended_ = nullptr;
  const std::unique_ptr<Executor> executor_ = make_executor();
  device::CopyStreams copies_;
  ReceivedMemory received_{copies_, *executor_};
  IncomingParts receiver_{copies_, received_};
  OutgoingParts sender_{std::make_shared<device::EventPool>(),
                        [this](const net::Channel* channel) { return channel != ended_; }};
  const std::shared_ptr<LendingChannel> channel_ = connect();
};

TEST_F(PartsInDeviceMemory, TensorsArriveOnTheDevice) {
  for (const int polls : {0, 3}) {
    device_.reset(polls);
    for (const std::int64_t parts : {2, 5, 20}) {
      const at::Tensor tensor = values(parts), sent = tensor.clone();
      const SplitTensorPtr split = this->split(sent);
      ASSERT_NE(split, nullptr);
      sent.zero_();  // the values of the moment of the call
      send_all(*split, channel_);
      expect_arrived(channel_.get(), *split, tensor, /*stays=*/true);
    }
  }
  EXPECT_EQ(channel_->through_host, 0);
  EXPECT_EQ(counter_.value(), channel_->lent);
  EXPECT_EQ(channel_->lent, 2 * (3 + 6 + 21));
  while (!channel_->leases.empty()) channel_->return_one();
  EXPECT_EQ(area_->used(), 0);
}

TEST_F(PartsInDeviceMemory, SmallTensorsAndSmallAreasGoThroughHostMemory) {
  EXPECT_EQ(split(at::zeros({kShared - 1}, at::kByte).to(stand_in(0))), nullptr);
  EXPECT_NE(split(at::zeros({kShared}, at::kByte).to(stand_in(0))), nullptr);
  EXPECT_EQ(
      SharedBuffers::part_of(LentArea(runtime_->allocate(stand_in(0), 4 * kShared - 1), 4 * kShared - 1)), 0);
}

/// The receiver's limit is that of all ways from a device.
TEST_F(PartsInDeviceMemory, TheLimitOfTensorsIsThatOfTheDevice) {
  std::vector<SplitTensorPtr> all;
  const at::Tensor large = at::zeros({8 << 20}, at::kByte).to(stand_in(0));
  for (int i = 0; i < 16; ++i)
    all.push_back(i % 2 == 0 ? split(values(2)) : sender_.split(kPeer, large, {.instance = 7, .version = 1}));
  EXPECT_EQ(std::count(all.begin(), all.end(), nullptr), 0);
  EXPECT_EQ(split(values(2)), nullptr);
  EXPECT_EQ(sender_.split(kPeer, large, {.instance = 7, .version = 1}), nullptr);
}

/// At most three parts, and the next one when the peer has returned one.
TEST_F(PartsInDeviceMemory, LeaveRoomForOthers) {
  const at::Tensor tensor = values(8);
  const SplitTensorPtr split = this->split(tensor);
  split->advance(channel_);
  EXPECT_EQ(split->sent(), 3 * kShared);
  EXPECT_FALSE(split->can_advance());
  EXPECT_TRUE(area_->has_room(kShared));
  channel_->return_one();
  EXPECT_TRUE(split->can_advance());
  split->advance(channel_);
  EXPECT_EQ(split->sent(), 4 * kShared);
  send_all(*split, channel_);
  EXPECT_EQ(channel_->through_host, 0);
  expect_arrived(channel_.get(), *split, tensor, /*stays=*/true);
}

/// Other tensors occupy the area; their messages may wait for a thread that waits for this one.
TEST_F(PartsInDeviceMemory, AFullAreaDelaysNothing) {
  device_.reset(/*polls=*/3);
  const Lease others = area_->take(4 * kShared).value();
  const at::Tensor tensor = values(6);
  const SplitTensorPtr split = this->split(tensor);
  EXPECT_TRUE(split->can_advance());
  split->advance(channel_);
  EXPECT_EQ(split->copied(), 2 * kShared);
  area_->drop(others.id);
  send_all(*split, channel_);
  EXPECT_EQ(channel_->through_host, 2);
  EXPECT_EQ(channel_->lent, 5) << "the area has room again";
  expect_arrived(channel_.get(), *split, tensor, /*stays=*/true);
}

/// The receiver's device has no room when the first part arrives.
TEST_F(PartsInDeviceMemory, ATensorWithoutRoomOnTheDeviceWaitsInHostMemory) {
  const at::Tensor tensor = values(6), next = values(3);
  const SplitTensorPtr split = this->split(tensor);
  device_.set_largest_allocation(tensor.nbytes() - 1);
  split->advance(channel_);
  device_.set_largest_allocation(std::size_t{1} << 40);
  send_all(*split, channel_);
  EXPECT_EQ(channel_->through_host, 0);
  expect_arrived(channel_.get(), *split, tensor, /*stays=*/false);
  const SplitTensorPtr later = this->split(next);
  send_all(*later, channel_);
  expect_arrived(channel_.get(), *later, next, /*stays=*/false);  // the device is not asked again for a while
}

TEST(ReceivedMemory, IsBoundedUnlessNothingElseWaits) {
  device::CopyStreams copies;
  const std::unique_ptr<Executor> executor = make_executor();
  auto memory = std::make_unique<ReceivedMemory>(copies, *executor, 1000);
  std::optional<Buffer> large = memory->allocate(stand_in(0), 5000);
  ASSERT_TRUE(large);
  EXPECT_EQ(large->size, 5000);
  EXPECT_FALSE(memory->allocate(stand_in(0), 1));
  std::optional<Buffer> elsewhere = memory->allocate(stand_in(1), 600);
  EXPECT_TRUE(elsewhere) << "another device";
  EXPECT_FALSE(memory->allocate(stand_in(1), 401));
  EXPECT_TRUE(memory->allocate(stand_in(1), 400));
  large->owner.reset();
  std::optional<Buffer> fits = memory->allocate(stand_in(0), 1000);
  ASSERT_TRUE(fits);
  EXPECT_FALSE(memory->allocate(stand_in(0), 1));
  EXPECT_FALSE(memory->allocate(stand_in(0), ~std::size_t{0}));
  at::Tensor taken = std::move(*std::static_pointer_cast<at::Tensor>(fits->owner));
  fits.reset();
  EXPECT_TRUE(memory->allocate(stand_in(0), 1000)) << "the tensor is its user's now";
  memory.reset();
  elsewhere.reset();  // later than the table
}

TEST_F(PartsInDeviceMemory, ATensorBeginsInTheAreaAndContinuesThroughHostMemory) {
  const at::Tensor tensor = values(9);
  const SplitTensorPtr split = this->split(tensor);
  split->advance(channel_);
  const Lease others = area_->take(kShared).value();
  while (!channel_->leases.empty()) {
    channel_->return_one();
    ASSERT_TRUE(area_->take(kShared)) << "another message was faster";
  }
  send_all(*split, channel_);
  EXPECT_EQ(channel_->lent, 3);
  EXPECT_GE(channel_->through_host, 7);
  expect_arrived(channel_.get(), *split, tensor, /*stays=*/true);
  area_->drop(others.id);
}

/// Parts that a connection took with it never return. The tensor fails, and the next one does not wait for them.
TEST_F(PartsInDeviceMemory, PartsOfAnEndedConnectionDelayNothing) {
  channel_->lost = true;
  SplitTensorPtr split = this->split(values(8));
  split->advance(channel_);
  EXPECT_FALSE(split->can_advance());
  ended_ = channel_.get();
  channel_->broken = true;
  ASSERT_TRUE(split->can_advance()) << "it would wait for ever";
  EXPECT_EQ(kind_of([&] {
              for (int i = 0; i < 10; ++i) split->advance(channel_);
            }),
            ErrorKind::kDisconnected);
  split.reset();
  EXPECT_EQ(area_->used(), 3) << "the peer's device may read them";
  const at::Tensor tensor = values(6);
  const auto next = connect();
  split = this->split(tensor);
  send_all(*split, next);
  EXPECT_EQ(next->through_host, 0) << "the rest of the area";
  expect_arrived(next.get(), *split, tensor, /*stays=*/true);
}

/// The copies of a dropped tensor may still write the area.
TEST_F(PartsInDeviceMemory, ADroppedTensorKeepsItsPartsUntilTheyAreWritten) {
  device_.reset(/*polls=*/1000);
  SplitTensorPtr split = this->split(values(6));
  split->fill();
  EXPECT_EQ(area_->used(), 3);
  split.reset();
  EXPECT_EQ(area_->used(), 3);
  device_.reset();
  const at::Tensor tensor = values(3);
  split = this->split(tensor);
  send_all(*split, channel_);
  expect_arrived(channel_.get(), *split, tensor, /*stays=*/true);
  while (!channel_->leases.empty()) channel_->return_one();
  EXPECT_EQ(area_->used(), 0);
}

/// Others take and free parts of the area, returns come late, tensors are dropped, connections end.
TEST_F(PartsInDeviceMemory, RandomOrders) {
  std::size_t arrived = 0, lent = 0, through_host = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    device_.reset(static_cast<int>(random() % 4));
    auto channel = connect();
    std::vector<Lease> others;
    std::vector<std::pair<SplitTensorPtr, at::Tensor>> all;
    for (int step = 0; step < 400; ++step) {
      if (!channel->leases.empty() && random() % 2 == 0) channel->return_one();
      if (random() % 4 == 0) {
        if (const auto lease = area_->take(1 + random() % (4 * kShared))) others.push_back(*lease);
      } else if (!others.empty() && random() % 3 == 0) {
        area_->drop(others.back().id);
        others.pop_back();
      }
      if (all.size() < 3 && random() % 4 == 0) {
        const at::Tensor tensor = values(2 + static_cast<std::int64_t>(random() % 6));
        all.emplace_back(split(tensor), tensor);
        ASSERT_NE(all.back().first, nullptr);
      }
      if (all.empty()) continue;
      const auto place = all.begin() + static_cast<std::ptrdiff_t>(random() % all.size());
      auto& [one, tensor] = *place;
      if (random() % 60 == 0) {
        all.erase(place);
      } else if (!one->done()) {
        one->advance(channel);
      } else {
        std::vector<Buffer> segments;
        std::vector<wire::DeviceSegment> on_device;
        receiver_.insert(channel.get(), wire::to_payload(SplitPlaces{{{0, one->number()}}}).value,
                         {segments, on_device});
        one->message_sent();
        const c10::Device where = on_device.empty() ? c10::Device(c10::kCPU) : on_device[0].device;
        const at::Tensor got = device::view_memory(segments[0].data, tensor.sizes(), {1}, at::kByte, where);
        EXPECT_TRUE(at::equal(got.cpu(), tensor.cpu()));
        ++arrived;
        all.erase(place);
      }
    }
    all.clear();
    for (const Lease& lease : others) area_->drop(lease.id);
    while (!channel->leases.empty()) channel->return_one();
    EXPECT_EQ(receiver_.waiting(), 0);
    device_.reset();
    split(values(2))->advance(channel);  // forgets what was discarded
    while (!channel->leases.empty()) channel->return_one();
    EXPECT_EQ(area_->used(), 0);
    lent += channel->lent;
    through_host += channel->through_host;
  }
  EXPECT_GE(arrived, 100);
  EXPECT_GE(lent, 300);
  EXPECT_GE(through_host, 20);
}

}  // namespace
}  // namespace torchspan::rpc::shared_buffers_test
