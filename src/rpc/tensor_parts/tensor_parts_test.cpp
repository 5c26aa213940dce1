// Large tensors in parts, without workers: which copies overlap with which parts, turns of several tensors, what is told
// to the peer when a tensor is dropped, and peers that lie.
#include <deque>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include <ATen/ATen.h>

#include "rpc/tensor_parts/incoming_parts.h"
#include "rpc/tensor_parts/outgoing_parts.h"
#include "tests/support/errors.h"
#include "tests/support/stand_in_device.h"

namespace torchspan::rpc::tensor_parts_test {
namespace {

using namespace torchspan::testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr PeerId kPeer{1, 0}, kOther{2, 0};
constexpr std::size_t kPart = 64;

/// Delivers parts to a table at once, and holds their memory until the test releases it, as a slow network does.
class SlowChannel final : public net::Channel {
 public:
  explicit SlowChannel(IncomingParts& peer) : peer_(peer) {}

  void send(BytesView header, std::span<const Segment> segments) override {
    if (broken) throw Error(ErrorKind::kDisconnected, "broken, as the test wants");
    const wire::FrameView frame = wire::decode_frame(header, {3, 3, 0});
    EXPECT_EQ(frame.header.type, TensorPart::kType);
    EXPECT_EQ(frame.header.instance, 7);
    EXPECT_EQ(frame.header.version, 3);
    wire::Payload payload;
    payload.value.assign(frame.value.begin(), frame.value.end());
    std::vector<Buffer> arrived;
    for (const Segment& segment : segments) {
      arrived.push_back(allocate_buffer(segment.size));
      std::memcpy(arrived.back().data, segment.data, segment.size);
      EXPECT_NE(segment.keep, nullptr);
      if (holds) held.push_back(segment.keep);
      ++parts;
    }
    peer_.receive(this, wire::from_payload<TensorPart>(payload), arrived);
  }
  std::size_t unsent_bytes() const override { return 0; }
  void close() override {}
  std::string peer() const override { return "slow"; }

  bool broken = false, holds = true;
  std::size_t parts = 0;
  std::deque<std::shared_ptr<const void>> held;

 private:
  IncomingParts& peer_;
};

class TensorParts : public ::testing::Test {
 protected:
  void SetUp() override { device_.reset(); }
  void TearDown() override {
    EXPECT_THAT(device_.take_races(), IsEmpty());
    device_.reset();
  }
  SplitTensorPtr split(const at::Tensor& tensor, PeerId to = kPeer) {
    return sender_.split(to, tensor, {.instance = 7, .version = 3});
  }
  static at::Tensor on_device(const at::Tensor& tensor) { return tensor.to(stand_in(0)); }
  static at::Tensor bytes(std::int64_t parts) {
    return on_device(at::arange(parts * static_cast<std::int64_t>(kPart), at::kByte));
  }
  /// The tensors that a message with these places gets.
  std::vector<Buffer> arrived(std::vector<SplitPlace> places) {
    std::vector<Buffer> segments;
    std::vector<wire::DeviceSegment> on_device;
    receiver_.insert(channel_.get(), wire::to_payload(SplitPlaces{std::move(places)}).value,
                     {segments, on_device});
    return segments;
  }
  void expect_arrived(const SplitTensor& split, const at::Tensor& tensor) {
    const std::vector<Buffer> got = arrived({{0, split.number()}});
    ASSERT_EQ(got.size(), 1);
    const at::Tensor plain = tensor.cpu().contiguous();
    ASSERT_EQ(got[0].size, plain.nbytes());
    EXPECT_EQ(std::memcmp(got[0].data, plain.data_ptr(), plain.nbytes()), 0);
  }
  void send_all(SplitTensor& split) {
    for (int i = 0; i < 1000 && !split.done(); ++i) {
      split.advance(channel_);
      channel_->held.clear();
    }
    ASSERT_TRUE(split.done());
  }

  StandInStreams& device_ = StandInStreams::get();
  const std::unique_ptr<Executor> executor_ = make_executor();
  device::CopyStreams copies_;
  ReceivedMemory received_{copies_, *executor_};
  IncomingParts receiver_{copies_, received_};
  OutgoingParts sender_{std::make_shared<device::EventPool>(), [](const net::Channel*) { return true; },
                        kPart};
  const std::shared_ptr<SlowChannel> channel_ = std::make_shared<SlowChannel>(receiver_);
};

TEST_F(TensorParts, TensorsArriveWhateverTheirShape) {
  device_.reset(/*polls=*/2);
  for (const std::int64_t rows : {16, 17, 100}) {
    const at::Tensor x = at::arange(rows * 4, at::kDouble).view({rows, 4});
    for (const at::Tensor& tensor :
         {x, x.t().contiguous(), x.to(at::kHalf).repeat({4, 1}), x.slice(1, 0, 3)}) {
      const at::Tensor there = on_device(tensor);
      const SplitTensorPtr split = this->split(there);
      ASSERT_NE(split, nullptr);
      EXPECT_EQ(split->captured().sizes(), tensor.sizes());
      there.zero_();  // the values of the moment of the call
      const std::size_t waits = device_.host_waits();
      send_all(*split);
      EXPECT_EQ(device_.host_waits(), waits) << "the host waited for a device";
      expect_arrived(*split, tensor);
      split->message_sent();
    }
  }
  EXPECT_EQ(receiver_.waiting(), 0);
}

TEST_F(TensorParts, SmallTensorsAreNotSplit) {
  EXPECT_EQ(split(on_device(at::zeros({2 * kPart - 1}, at::kByte))), nullptr);
  EXPECT_NE(split(on_device(at::zeros({2 * kPart}, at::kByte))), nullptr);
}

/// The first part is sent when the device has copied one more, and not the rest; the next copy begins while a part is
/// being sent, in the buffer that is free.
TEST_F(TensorParts, CopiesOverlapWithParts) {
  const at::Tensor tensor = bytes(5);
  const SplitTensorPtr split = this->split(tensor);
  split->fill();
  EXPECT_EQ(split->copied(), 2 * kPart) << "two copies are under way before anything is sent";
  EXPECT_EQ(split->sent(), 0);
  split->advance(channel_);
  EXPECT_EQ(split->sent(), 2 * kPart);
  EXPECT_EQ(split->copied(), 2 * kPart) << "both buffers are being sent";
  EXPECT_FALSE(split->can_advance());
  for (std::size_t part = 3; part <= 5; ++part) {
    channel_->held.pop_front();
    EXPECT_EQ(channel_->held.size(), 1) << "one part is still being sent";
    EXPECT_TRUE(split->can_advance());
    split->fill();
    EXPECT_EQ(split->copied(), part * kPart) << "no copy overlaps with the part that is being sent";
    split->advance(channel_);
    EXPECT_EQ(split->sent(), part * kPart);
  }
  EXPECT_TRUE(split->done());
  EXPECT_EQ(channel_->parts, 5);
  expect_arrived(*split, tensor);
  split->message_sent();
}

TEST_F(TensorParts, TensorsToOnePeerTakeTurnsInTheOrderOfTheirCalls) {
  const at::Tensor a = bytes(3), b = bytes(4), c = bytes(2);
  const SplitTensorPtr first = split(a), second = split(b), elsewhere = split(c, kOther);
  second->advance(channel_);
  second->fill();
  EXPECT_FALSE(second->can_advance());
  EXPECT_EQ(second->copied(), 0) << "it is the turn of another tensor";
  EXPECT_TRUE(elsewhere->can_advance()) << "other peers have other buffers";
  send_all(*first);
  EXPECT_TRUE(second->can_advance());
  send_all(*second);
  expect_arrived(*first, a);
  expect_arrived(*second, b);
  first->message_sent();
  second->message_sent();
}

/// The message of the first tensor was dropped, with a part sent, another one in a buffer, and the rest on the device.
TEST_F(TensorParts, ADroppedTensorMakesRoomAndIsForgottenByThePeer) {
  SplitTensorPtr first = split(bytes(6));
  const at::Tensor tensor = bytes(3);
  const SplitTensorPtr second = split(tensor);
  first->fill();
  device_.reset(/*polls=*/1000);
  first->advance(channel_);
  EXPECT_FALSE(first->done());
  channel_->held.clear();
  first->fill();
  first.reset();
  EXPECT_EQ(receiver_.waiting(), 0);
  device_.reset();
  send_all(*second);
  expect_arrived(*second, tensor);
  second->message_sent();
}

TEST_F(TensorParts, ThePeerKeepsWhatAMessageNeeds) {
  const at::Tensor a = bytes(2), b = bytes(2);
  SplitTensorPtr kept = split(a), dropped = split(b);
  send_all(*kept);
  send_all(*dropped);
  EXPECT_EQ(receiver_.waiting(), 2);
  EXPECT_TRUE(kept->sent_on(channel_.get()));
  EXPECT_FALSE(kept->sent_on(nullptr));
  kept->message_sent();
  const std::uint64_t number = kept->number();
  kept.reset();
  dropped.reset();
  EXPECT_EQ(receiver_.waiting(), 1);
  EXPECT_EQ(arrived({{0, number}}).size(), 1);
}

TEST_F(TensorParts, ABrokenConnectionEndsOneTensorAfterTheOther) {
  SplitTensorPtr first = split(bytes(4)), second = split(bytes(4));
  first->advance(channel_);
  channel_->held.clear();
  channel_->broken = true;
  EXPECT_EQ(kind_of([&] { first->advance(channel_); }), ErrorKind::kDisconnected);
  EXPECT_FALSE(first->done());
  first.reset();
  EXPECT_EQ(kind_of([&] { second->advance(channel_); }), ErrorKind::kDisconnected);
  second.reset();
  receiver_.closed(channel_.get());
  EXPECT_EQ(receiver_.waiting(), 0);
}

/// At most two parts of a peer are in memory, and at most 16 tensors wait on the device.
TEST_F(TensorParts, ManyTensorsAreBounded) {
  std::vector<SplitTensorPtr> all;
  for (int i = 0; i < 16; ++i) all.push_back(split(bytes(3)));
  EXPECT_EQ(std::count(all.begin(), all.end(), nullptr), 0);
  EXPECT_EQ(split(bytes(3)), nullptr);
  EXPECT_NE(split(bytes(3), kOther), nullptr);
  for (int i = 0; i < 100; ++i) {
    for (const SplitTensorPtr& one : all) one->advance(channel_);
  }
  EXPECT_EQ(channel_->parts, 2);
  for (const SplitTensorPtr& one : all) send_all(*one);
  EXPECT_EQ(split(bytes(3)), nullptr) << "their messages were not sent";
  all.pop_back();
  EXPECT_NE(split(bytes(3)), nullptr);
  sender_.departed(kPeer);
  all.clear();
  EXPECT_EQ(split(bytes(3)), nullptr) << "it has departed";
  EXPECT_NE(split(bytes(3), PeerId{kPeer.rank, kPeer.incarnation + 1}), nullptr);
}

/// Releases parts, advances and drops tensors in random order.
TEST_F(TensorParts, RandomOrders) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    device_.reset(static_cast<int>(random() % 4));
    std::vector<std::pair<SplitTensorPtr, at::Tensor>> all;
    for (int step = 0; step < 300; ++step) {
      if (!channel_->held.empty() && random() % 2 == 0) channel_->held.pop_front();
      if (all.size() < 5 && random() % 3 == 0) {
        const auto elements = static_cast<std::int64_t>(kPart / 4 + random() % (kPart / 2));
        const at::Tensor values = at::arange(elements, at::kDouble) + static_cast<double>(random() % 1000);
        all.emplace_back(split(on_device(values)), values);
        ASSERT_NE(all.back().first, nullptr);
        continue;
      }
      if (all.empty()) continue;
      const auto place = all.begin() + static_cast<std::ptrdiff_t>(random() % all.size());
      auto& [one, values] = *place;
      if (random() % 40 == 0) {
        all.erase(place);
      } else if (one->done()) {
        expect_arrived(*one, values);
        one->message_sent();
        all.erase(place);
      } else {
        one->advance(channel_);
      }
    }
    all.clear();
    channel_->held.clear();
    EXPECT_EQ(receiver_.waiting(), 0);
  }
}

class LyingPeer : public ::testing::Test {
 protected:
  void receive(std::uint64_t tensor, std::uint64_t bytes, std::vector<std::size_t> sizes) {
    std::vector<Buffer> segments;
    for (const std::size_t size : sizes) segments.push_back(allocate_buffer(size));
    table_.receive(nullptr, {tensor, bytes}, segments);
  }
  std::size_t insert(std::vector<SplitPlace> places) {
    table_.insert(nullptr, wire::to_payload(SplitPlaces{std::move(places)}).value, {segments_, on_device_});
    return segments_.size();
  }
  const std::unique_ptr<Executor> executor_ = make_executor();
  device::CopyStreams copies_;
  ReceivedMemory received_{copies_, *executor_};
  IncomingParts table_{copies_, received_};
  std::vector<Buffer> segments_{allocate_buffer(1), allocate_buffer(2)};
  std::vector<wire::DeviceSegment> on_device_{{1, c10::kCPU}};
};

TEST_F(LyingPeer, PartsThatDoNotFitAreRefused) {
  receive(1, 100, {60});
  for (const auto& wrong :
       std::vector<std::tuple<std::uint64_t, std::uint64_t, std::vector<std::size_t>>>{{1, 100, {41}},
                                                                                       {1, 99, {10}},
                                                                                       {1, 101, {10}},
                                                                                       {1, 100, {0}},
                                                                                       {1, 100, {10, 10}},
                                                                                       {2, 5, {6}},
                                                                                       {3, 0, {1}},
                                                                                       {9, 100, {}}}) {
    const auto& [tensor, bytes, sizes] = wrong;
    const Error error = error_of([&, t = tensor, b = bytes, s = sizes] { receive(t, b, s); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << tensor << " " << bytes;
    EXPECT_THAT(error.what(), HasSubstr("tensor " + std::to_string(tensor)));
  }
  EXPECT_EQ(kind_of([&] { receive(5, ~std::uint64_t{0}, {10}); }), ErrorKind::kOverloaded);
  receive(1, 100, {40});
  EXPECT_EQ(kind_of([&] { receive(1, 100, {1}); }), ErrorKind::kInvalid);
  EXPECT_EQ(insert({{0, 1}}), 3);
}

TEST_F(LyingPeer, MessagesWithoutTheirPartsAreRefused) {
  receive(1, 10, {10});
  receive(2, 10, {9});
  for (const std::vector<SplitPlace>& wrong :
       std::vector<std::vector<SplitPlace>>{{{0, 2}}, {{0, 3}}, {{3, 1}}}) {
    EXPECT_EQ(kind_of([&] { insert(wrong); }), ErrorKind::kInvalid);
  }
  EXPECT_EQ(kind_of([&] { insert({{1, 1}, {1, 2}}); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { insert({{0, 1}}); }), ErrorKind::kInvalid) << "twice";
}

TEST_F(LyingPeer, CannotMakeTheTableGrowWithoutBound) {
  ErrorKind last = ErrorKind::kInvalid;
  std::uint64_t count = 0;
  for (; count < 5000 && last != ErrorKind::kOverloaded; ++count) {
    try {
      receive(count, 100, {1});
    } catch (const Error& error) {
      last = error.kind();
    }
  }
  EXPECT_EQ(last, ErrorKind::kOverloaded);
  EXPECT_EQ(table_.waiting(), count - 1);
  table_.closed(nullptr);
  EXPECT_EQ(table_.waiting(), 0);
}

TEST_F(LyingPeer, PartsBecomeSegmentsAmongOthers) {
  receive(1, 3, {3});
  receive(2, 4, {1});
  receive(2, 4, {3});
  EXPECT_EQ(insert({{0, 1}, {2, 2}}), 4);
  std::vector<std::size_t> sizes;
  for (const Buffer& segment : segments_) sizes.push_back(segment.size);
  EXPECT_EQ(sizes, (std::vector<std::size_t>{3, 1, 4, 2}));
  EXPECT_EQ(on_device_.front().index, 3);
}

/// Sizes of what is in device memory are checked as those of host memory, and parts may lie in both.
TEST_F(LyingPeer, PartsInDeviceMemoryMustFit) {
  const at::Tensor part = at::arange(60, at::kByte).to(stand_in(0));
  const Buffer segment{static_cast<std::byte*>(part.data_ptr()), part.nbytes(), std::make_shared<int>()};
  table_.receive(nullptr, {1, 100}, {segment}, stand_in(0));
  EXPECT_EQ(kind_of([&] { table_.receive(nullptr, {1, 100}, {segment}, stand_in(0)); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] {
              table_.receive(nullptr, {1, 100}, {segment, segment}, stand_in(0));
            }),
            ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] {
              table_.receive(nullptr, {2, ~std::uint64_t{0}}, {segment}, stand_in(0));
            }),
            ErrorKind::kOverloaded);
  receive(1, 100, {40});
  EXPECT_EQ(insert({{1, 1}}), 3);
  ASSERT_EQ(on_device_.size(), 2);
  EXPECT_EQ(on_device_[0].index, 1);
  EXPECT_EQ(on_device_[0].device, stand_in(0));
  EXPECT_EQ(on_device_[0].memory, wire::DeviceSegment::Memory::kReceived);
  EXPECT_EQ(on_device_[1].index, 2);
  const at::Tensor whole = std::move(*std::static_pointer_cast<at::Tensor>(segments_[1].owner));
  EXPECT_TRUE(at::equal(whole.cpu().narrow(0, 0, 60), part.cpu()));
}

}  // namespace
}  // namespace torchspan::rpc::tensor_parts_test
