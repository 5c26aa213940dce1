// The parts of the memory that workers share on devices, without a worker: which parts of an area are free, offers,
// and peers that lie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <unistd.h>

#include <ATen/ATen.h>

#include "rendezvous/api/process_stat.h"
#include "rpc/device_memory/incoming_memory.h"
#include "rpc/device_memory/outgoing_memory.h"
#include "rpc/device_memory/received_memory.h"
#include "tests/support/errors.h"
#include "tests/support/stand_in_device.h"
#include "tests/support/stand_in_runtime.h"

namespace torchspan::rpc::device_memory_test {
namespace {

using namespace torchspan::testing;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr PeerId kPeer{1, 0}, kOther{2, 0};

LentArea heap_area(std::size_t bytes) {
  return LentArea(std::shared_ptr<std::byte>(new std::byte[bytes], std::default_delete<std::byte[]>()),
                  bytes);
}

/// The area gives out what a map of every 256 bytes says is free, and nothing twice.
TEST(LentArea, GivesOutFreePartsOnly) {
  constexpr std::size_t kUnits = 64, kUnit = 256;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    LentArea area = heap_area(kUnits * kUnit);
    std::vector<bool> taken(kUnits, false);
    std::vector<Lease> leases;
    for (int step = 0; step < 400; ++step) {
      if (random() % 2 == 0 && !leases.empty()) {
        const auto at = static_cast<std::ptrdiff_t>(random() % leases.size());
        const Lease lease = leases[static_cast<std::size_t>(at)];
        if (random() % 2 == 0) {
          area.lend(lease.id);
          area.drop(lease.id);  // the message is gone here, and the peer has the part
          area.returned(lease.id);
        } else {
          area.drop(lease.id);
        }
        for (std::size_t i = 0; i < (lease.bytes + kUnit - 1) / kUnit; ++i)
          taken[lease.offset / kUnit + i] = false;
        leases.erase(leases.begin() + at);
        continue;
      }
      const std::size_t bytes = 1 + random() % (20 * kUnit), units = (bytes + kUnit - 1) / kUnit;
      std::size_t run = 0, longest = 0;
      for (const bool used : taken) longest = std::max(longest, run = used ? 0 : run + 1);
      const bool has_room = area.has_room(bytes);
      const std::optional<Lease> lease = area.take(bytes);
      ASSERT_EQ(lease.has_value(), has_room);
      ASSERT_EQ(lease.has_value(), longest >= units);
      if (!lease) continue;
      EXPECT_EQ(lease->offset % kUnit, 0);
      for (std::size_t i = 0; i < units; ++i) {
        ASSERT_FALSE(taken.at(lease->offset / kUnit + i));
        taken[lease->offset / kUnit + i] = true;
      }
      leases.push_back(*lease);
    }
    EXPECT_EQ(area.used(), leases.size());
  }
}

TEST(LentArea, KeepsWhatThePeerHasUntilThePeerReturnsIt) {
  LentArea area = heap_area(1024);
  const Lease lease = area.take(1000).value();
  EXPECT_EQ(area.take(1), std::nullopt);
  area.lend(lease.id);
  area.drop(lease.id);
  EXPECT_EQ(area.take(1), std::nullopt);
  area.returned(lease.id);
  area.returned(lease.id);  // the peer may say it again
  EXPECT_NE(area.take(1), std::nullopt);
}

TEST(LentArea, RefusesPartsThatThePeerNeverGot) {
  LentArea area = heap_area(1024);
  const Lease lease = area.take(10).value();
  for (const std::uint64_t wrong : {std::uint64_t{0}, lease.id, lease.id + 1}) {
    const Error error = error_of([&] { area.returned(wrong); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), HasSubstr("lease " + std::to_string(wrong)));
  }
  area.lend(lease.id);
  area.take_back(lease.id);  // the channel did not take the message
  EXPECT_EQ(kind_of([&] { area.returned(lease.id); }), ErrorKind::kInvalid);
  EXPECT_EQ(area.used(), 1);
}

class OutgoingMemoryTest : public ::testing::Test {
 protected:
  OutgoingMemory::Shared share(PeerId to = kPeer, std::size_t bytes = 100) {
    return memory_.share(to, stand_in(0), stand_in(1), bytes);
  }
  /// Both offers, accepted.
  OfferDeviceMemory accept(PeerId by = kPeer) {
    const OfferDeviceMemory question = share(by).offer.value();
    EXPECT_TRUE(question.handle.empty());
    OfferDeviceMemory offer =
        memory_.answered(by, question.route, {OfferOutcome::kAccepted, {}}, failure_).value();
    EXPECT_FALSE(offer.handle.empty());
    EXPECT_EQ(share(by).tensor, nullptr) << "before the peer has mapped the memory";
    EXPECT_FALSE(memory_.answered(by, offer.route, {OfferOutcome::kAccepted, {}}, failure_));
    return offer;
  }
  static ProcessId this_process() {
    return {getpid(), rendezvous::read_process_stat(getpid()).value().start_ticks};
  }

  const std::shared_ptr<StandInRuntime> runtime_ = std::make_shared<StandInRuntime>();
  OutgoingMemory memory_{runtime_, 4096};
  std::string failure_;
};

TEST_F(OutgoingMemoryTest, AsksFirstAndAllocatesForPeersThatWantIt) {
  const OfferDeviceMemory question = share().offer.value();
  EXPECT_EQ(question.from, stand_in(0).str());
  EXPECT_EQ(question.to, stand_in(1).str());
  EXPECT_EQ(memory_.areas(), 0);
  EXPECT_FALSE(share().offer) << "it asked twice";
  memory_.answered(kPeer, question.route, {OfferOutcome::kUnwanted, "no map"}, failure_);
  EXPECT_EQ(failure_, "");
  EXPECT_EQ(memory_.areas(), 0);
  EXPECT_EQ(share().tensor, nullptr);
  accept(kOther);
  EXPECT_EQ(memory_.areas(), 1);
  EXPECT_NE(share(kOther).tensor, nullptr);
  EXPECT_EQ(share(kOther, 5000).tensor, nullptr) << "larger than the area";
  EXPECT_EQ(memory_.area_to(kOther, stand_in(0), stand_in(1))->area->size(), 4096);
  EXPECT_FALSE(memory_.area_to(kPeer, stand_in(0), stand_in(1))) << "unwanted";
  EXPECT_FALSE(memory_.area_to(kOther, stand_in(1), stand_in(1))) << "never offered";
  EXPECT_TRUE(share(PeerId{3, 0}, 5000).offer) << "parts of large tensors need an area, too";
  EXPECT_EQ(memory_.share(kOther, c10::kCPU, stand_in(1), 100).tensor, nullptr);
}

TEST_F(OutgoingMemoryTest, NeedsNoAreaWhereTheConnectionCarriesTensors) {
  const std::uint32_t route = share().offer.value().route;
  EXPECT_EQ(share().device_target, 0) << "before the peer has accepted";
  memory_.use_connection(kOther, route);
  EXPECT_EQ(share().device_target, 0) << "another peer accepted";
  memory_.use_connection(kPeer, route);
  const OutgoingMemory::Shared shared = share(kPeer, std::size_t{1} << 40);
  EXPECT_EQ(shared.device_target, route);
  EXPECT_EQ(shared.tensor, nullptr);
  EXPECT_FALSE(shared.offer);
  EXPECT_EQ(memory_.areas(), 0);
  EXPECT_FALSE(memory_.area_to(kPeer, stand_in(0), stand_in(1)));
  EXPECT_EQ(kind_of([&] { memory_.returned(kPeer, {route, {1}}); }), ErrorKind::kInvalid);
  memory_.departed(kPeer, this_process());
  EXPECT_EQ(memory_.areas(), 0);
  EXPECT_TRUE(share().offer) << "its successor begins anew";
}

/// The question went over another connection than the offer.
TEST_F(OutgoingMemoryTest, FreesItsAreaIfTheOffersConnectionCarriesTensors) {
  const OfferDeviceMemory question = share().offer.value();
  EXPECT_TRUE(memory_.answered(kPeer, question.route, {OfferOutcome::kAccepted, {}}, failure_));
  EXPECT_EQ(memory_.areas(), 1);
  memory_.use_connection(kPeer, question.route);
  EXPECT_EQ(memory_.areas(), 0);
  EXPECT_EQ(share().device_target, question.route);
}

TEST_F(OutgoingMemoryTest, SaysWhyAPeerCannotMapIt) {
  const OfferDeviceMemory question = share().offer.value();
  const auto offer = memory_.answered(kPeer, question.route, {OfferOutcome::kAccepted, {}}, failure_);
  memory_.answered(kPeer, offer->route, {OfferOutcome::kFailed, "no peer access"}, failure_);
  EXPECT_EQ(failure_, "no peer access");
  EXPECT_EQ(memory_.areas(), 0);
  EXPECT_EQ(share().tensor, nullptr);

  OutgoingMemory refused(std::make_shared<StandInRuntime>(true, "cannot export"), 4096);
  const auto route = refused.share(kPeer, stand_in(0), stand_in(1), 100).offer->route;
  EXPECT_FALSE(refused.answered(kPeer, route, {OfferOutcome::kAccepted, {}}, failure_));
  EXPECT_THAT(failure_, HasSubstr("cannot export"));
}

TEST_F(OutgoingMemoryTest, BeginsAgainAfterALostOffer) {
  memory_.lost(kPeer, share().offer->route);
  accept();
  EXPECT_NE(share().tensor, nullptr);
}

TEST_F(OutgoingMemoryTest, BeginsAgainAfterALackOfMemory) {
  runtime_->run_out_of_memory(1);
  const std::uint32_t route = share().offer->route;
  EXPECT_FALSE(memory_.answered(kPeer, route, {OfferOutcome::kAccepted, {}}, failure_));
  EXPECT_THAT(failure_, HasSubstr("no memory left"));
  EXPECT_TRUE(memory_.lacks_memory(kPeer, route));
  EXPECT_FALSE(share().offer) << "it does not try again with every tensor";
  memory_.lost(kPeer, route);  // some time later
  EXPECT_FALSE(memory_.lacks_memory(kPeer, route));
  accept();
  EXPECT_NE(share().tensor, nullptr);
}

TEST_F(OutgoingMemoryTest, TakesAnswersAndReturnsFromThePeerOfTheRouteOnly) {
  const OfferDeviceMemory offer = accept();
  memory_.answered(kOther, offer.route, {OfferOutcome::kFailed, "a lie"}, failure_);
  EXPECT_EQ(failure_, "");
  const LentTensorPtr tensor = share().tensor;
  tensor->lend();
  const std::uint64_t lease = tensor->place(0).lease;
  for (const auto& [peer, route] : {std::pair(kOther, offer.route), std::pair(kPeer, offer.route + 1)}) {
    const Error error = error_of([&, by = peer, of = route] { memory_.returned(by, {of, {lease}}); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), HasSubstr("route"));
  }
  memory_.returned(kPeer, {offer.route, {lease}});
}

/// A device may still read the memory while the process lives, although the worker has left.
TEST_F(OutgoingMemoryTest, KeepsTheMemoryOfADepartedPeerUntilItsProcessHasEnded) {
  accept();
  accept(kOther);
  memory_.departed(kPeer, this_process());
  EXPECT_TRUE(memory_.free_ended());
  EXPECT_EQ(memory_.areas(), 2);
  ProcessId ended = this_process();
  ++ended.start_ticks;  // another process has the number now
  memory_.departed(kOther, ended);
  EXPECT_TRUE(memory_.free_ended());
  EXPECT_EQ(memory_.areas(), 1);
  EXPECT_TRUE(share().offer) << "its successor begins anew";
}

class IncomingMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    area_ = runtime_->allocate(stand_in(0), 4096);
    const Bytes handle = runtime_->export_memory(stand_in(0), area_.get());
    offer_.route = 7;
    offer_.bytes = 4096;
    offer_.handle.assign(reinterpret_cast<const char*>(handle.data()), handle.size());
    memory_.open(kPeer, offer_, stand_in(1));
  }
  std::vector<wire::DeviceSegment> insert(std::vector<SharedPlace> places, PeerId from = kPeer) {
    std::vector<wire::DeviceSegment> on_device;
    memory_.insert(from, wire::to_payload(SharedPlaces{std::move(places)}).value, {segments_, on_device});
    return on_device;
  }

  const std::shared_ptr<StandInRuntime> runtime_ = std::make_shared<StandInRuntime>();
  std::shared_ptr<std::byte> area_;
  OfferDeviceMemory offer_;
  std::vector<std::uint64_t> returned_;
  std::vector<Buffer> segments_{allocate_buffer(1), allocate_buffer(2)};
  IncomingMemory memory_{runtime_, [this](PeerId to, std::uint32_t route, std::uint64_t lease) {
                           EXPECT_EQ(to, kPeer);
                           EXPECT_EQ(route, 7);
                           returned_.push_back(lease);
                         }};
};

TEST_F(IncomingMemoryTest, InsertsTensorsAndReturnsThemWhenTheyAreGone) {
  area_.get()[100] = std::byte{42};
  const auto on_device = insert({{0, 7, 1, 0, 10}, {2, 7, 2, 100, 20}, {4, 7, 3, 4095, 1}});
  ASSERT_EQ(on_device.size(), 3);
  EXPECT_EQ(on_device[1].index, 2);
  EXPECT_EQ(on_device[1].device, stand_in(1));
  ASSERT_EQ(segments_.size(), 5);
  EXPECT_EQ(segments_[1].size, 1);
  EXPECT_EQ(segments_[2].size, 20);
  EXPECT_EQ(*segments_[2].data, std::byte{42});
  EXPECT_EQ(segments_[3].size, 2);
  memory_.departed(kPeer);
  EXPECT_EQ(*segments_[2].data, std::byte{42}) << "unmapped while a message uses it";
  segments_.clear();
  EXPECT_THAT(returned_, ::testing::UnorderedElementsAre(1, 2, 3));
}

TEST_F(IncomingMemoryTest, RefusesPlacesThatThePeerDidNotShare) {
  const std::uint64_t huge = ~std::uint64_t{0};
  for (const SharedPlace& wrong : std::vector<SharedPlace>{{0, 8, 1, 0, 10},
                                                           {0, 7, 1, 0, 4097},
                                                           {0, 7, 1, 4096, 1},
                                                           {0, 7, 1, huge, 2},
                                                           {0, 7, 1, 2, huge},
                                                           {0, 7, 1, 5, 0},
                                                           {3, 7, 1, 0, 10}}) {
    EXPECT_EQ(kind_of([&] { insert({wrong}); }), ErrorKind::kInvalid) << wrong.offset << " " << wrong.bytes;
  }
  EXPECT_EQ(kind_of([&] { insert({{0, 7, 1, 0, 10}}, kOther); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { insert({{0, 7, 1, 0, 10}}, PeerId{1, 1}); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { insert({{1, 7, 1, 0, 10}, {1, 7, 2, 0, 10}}); }), ErrorKind::kInvalid);
}

TEST_F(IncomingMemoryTest, KeepsSharedMemoryAndConnectionsApart) {
  OfferDeviceMemory offer;
  offer.from = offer.to = "cuda:0";
  offer.route = 8;
  memory_.accept(kPeer, offer, stand_in(0));
  EXPECT_EQ(memory_.device_of(kPeer, 8), stand_in(0));
  EXPECT_EQ(kind_of([&] { memory_.accept(kPeer, offer, stand_in(1)); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { insert({{0, 8, 1, 0, 10}}); }), ErrorKind::kInvalid);
  const auto device_of = [&](const PeerId& peer, std::uint32_t route) {
    return kind_of([&] { memory_.device_of(peer, route); });
  };
  EXPECT_EQ(device_of(kPeer, 7), ErrorKind::kInvalid) << "shared memory";
  EXPECT_EQ(device_of(kPeer, 9), ErrorKind::kInvalid) << "not offered";
  EXPECT_EQ(device_of(kOther, 8), ErrorKind::kInvalid) << "another peer's";
  memory_.departed(kPeer);
  EXPECT_EQ(device_of(kPeer, 8), ErrorKind::kInvalid) << "departed";
}

TEST_F(IncomingMemoryTest, ALostAnswerLeavesNoRouteOfAConnection) {
  OfferDeviceMemory offer;
  offer.from = offer.to = "cuda:0";
  for (std::uint32_t route = 8; route < 400; ++route) {
    offer.route = route;
    memory_.accept(kPeer, offer, stand_in(0));
  }
  EXPECT_EQ(memory_.device_of(kPeer, 399), stand_in(0));
  EXPECT_EQ(kind_of([&] { memory_.device_of(kPeer, 398); }), ErrorKind::kInvalid);
  EXPECT_NO_THROW(insert({{0, 7, 1, 0, 10}})) << "shared memory stays";
}

TEST_F(IncomingMemoryTest, KeepsNothingOfAPeerThatDepartsMeanwhile) {
  class Departing final : public StandInRuntime {
   public:
    std::shared_ptr<std::byte> open_memory(c10::Device device, BytesView handle,
                                           std::size_t bytes) const override {
      auto memory = StandInRuntime::open_memory(device, handle, bytes);
      opened = memory;
      on_open();
      return memory;
    }
    std::function<void()> on_open;
    mutable std::weak_ptr<std::byte> opened;
  };
  const auto runtime = std::make_shared<Departing>();
  IncomingMemory memory(runtime, [](PeerId, std::uint32_t, std::uint64_t) {});
  runtime->on_open = [&] { memory.departed(kPeer); };
  EXPECT_EQ(kind_of([&] { memory.open(kPeer, offer_, stand_in(1)); }), ErrorKind::kDisconnected);
  EXPECT_TRUE(runtime->opened.expired());
  offer_.route = 8;
  offer_.from = offer_.to = "cuda:0";
  EXPECT_EQ(kind_of([&] { memory.accept(kPeer, offer_, stand_in(1)); }), ErrorKind::kDisconnected);
  const PeerId successor{kPeer.rank, kPeer.incarnation + 1};
  memory.accept(successor, offer_, stand_in(1));
  EXPECT_EQ(memory.device_of(successor, 8), stand_in(1));
}

TEST(ByteBudget, LimitsWhatIsInUseAndAdmitsOneOfAnySize) {
  auto budget = std::make_unique<ByteBudget>(100);
  std::shared_ptr<const void> large = budget->reserve(1000);
  EXPECT_NE(large, nullptr);
  EXPECT_EQ(budget->reserve(1), nullptr);
  large.reset();
  const std::shared_ptr<const void> first = budget->reserve(60);
  std::shared_ptr<const void> second = budget->reserve(40);
  EXPECT_NE(second, nullptr);
  EXPECT_EQ(budget->reserve(1), nullptr);
  second.reset();
  EXPECT_EQ(budget->reserve(41), nullptr);
  EXPECT_NE(budget->reserve(40), nullptr);
  budget.reset();  // reservations may outlive it
}

TEST_F(IncomingMemoryTest, InsertsBeforeAndAfterTensorsThatTheConnectionCarried) {
  std::vector<wire::DeviceSegment> on_device{{1, stand_in(0), wire::DeviceSegment::Memory::kReceived}};
  memory_.insert(kPeer, wire::to_payload(SharedPlaces{{{0, 7, 1, 0, 10}, {3, 7, 2, 100, 20}}}).value,
                 {segments_, on_device});
  ASSERT_EQ(segments_.size(), 4);
  ASSERT_EQ(on_device.size(), 3);
  const auto expect = [&](std::size_t i, std::size_t index, c10::Device device) {
    EXPECT_EQ(on_device[i].index, index);
    EXPECT_EQ(on_device[i].device, device);
  };
  expect(0, 0, stand_in(1));
  expect(1, 2, stand_in(0));
  expect(2, 3, stand_in(1));
}

TEST_F(IncomingMemoryTest, RefusesOffersThatAreNotWhatTheySay) {
  OfferDeviceMemory other = offer_;
  EXPECT_THAT(error_of([&] { memory_.open(kPeer, other, stand_in(1)); }).what(), HasSubstr("twice"));
  other.route = 8;
  other.bytes = 1 << 20;
  EXPECT_THAT(error_of([&] { memory_.open(kPeer, other, stand_in(1)); }).what(), HasSubstr("smaller"));
  for (const std::uint64_t bytes : {std::uint64_t{0}, ~std::uint64_t{0}}) {
    other.bytes = bytes;
    EXPECT_EQ(kind_of([&] { memory_.open(kPeer, other, stand_in(1)); }), ErrorKind::kInvalid);
  }
  other = offer_;
  other.handle = "/no-such-memory";
  for (std::uint32_t route = 8; route < 300; ++route) {
    other.route = route;
    EXPECT_EQ(kind_of([&] { memory_.open(kPeer, other, stand_in(1)); }), ErrorKind::kInvalid);
  }
  other = offer_;
  ErrorKind last = ErrorKind::kInvalid;
  for (std::uint32_t route = 8; route < 300 && last != ErrorKind::kOverloaded; ++route) {
    other.route = route;
    try {
      memory_.open(kPeer, other, stand_in(1));
    } catch (const Error& error) {
      last = error.kind();
    }
  }
  EXPECT_EQ(last, ErrorKind::kOverloaded);
}

TEST_F(IncomingMemoryTest, DamagedPlacesAreRefused) {
  const Bytes valid = wire::to_payload(SharedPlaces{{{0, 7, 1, 0, 10}, {2, 7, 2, 100, 20}}}).value;
  std::mt19937_64 random(5);
  for (int round = 0; round < 2000; ++round) {
    Bytes bytes = valid;
    if (round % 2 == 0) bytes.resize(random() % valid.size());
    if (!bytes.empty()) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    std::vector<Buffer> segments{allocate_buffer(1), allocate_buffer(2)};
    std::vector<wire::DeviceSegment> on_device;
    try {
      memory_.insert(kPeer, bytes, {segments, on_device});
      for (const Buffer& one : segments) ASSERT_NE(one.data, nullptr);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    }
  }
}

}  // namespace
}  // namespace torchspan::rpc::device_memory_test
