// The events of groups on devices come from pools, because creating one calls the driver.
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <torchspan/detail/device/streams.h>

#include "collective/api/event_gate.h"
#include "tests/conformance/collective_devices.h"
#include "tests/conformance/collective_world.h"

namespace torchspan::testing::collective_device_events {
namespace {

using namespace collective;
using std::chrono::seconds;

std::size_t events_made() { return StandInStreams::get().events_made(); }

/// Operations of one rank, and a continuation after each.
void run_operations(const Group& group, int count) {
  const at::Tensor tensor = at::ones({5}).to(stand_in(0));
  for (int i = 0; i < count; ++i) {
    group.all_reduce(tensor, kMax).then([](const Future<at::Tensor>& sum) { return sum.wait(); }).wait();
  }
}

TEST(DeviceEvents, OfAGroupAreReused) {
  constexpr int kOperations = 50;
  for (const BackendKind kind : {BackendKind::kNccl, BackendKind::kCudaIpc}) {
    StandInStreams::get().reset();
    CollectiveWorld world(2);
    std::size_t before = 0;
    const auto failures = world.try_each([&](CollectiveWorld::Rank self) {
      const auto meet = [&](const char* name) {
        self.membership.barrier(name, {}, world.executor().deadline_in(seconds(60)));
      };
      const Group group = make_group_of_row(self.runtime, self.membership, {.backend = kind});
      run_operations(group, 10);
      meet("test.first");
      if (self.rank == 0) before = events_made();
      meet("test.counted");
      run_operations(group, kOperations);
      meet("test.end");
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << to_error(failure).what();
    // More may be in use at once than before, but not one for each operation.
    EXPECT_LT(events_made() - before, kOperations / 2);
  }
}

TEST(DeviceEvents, OfAMessageToADeviceAreReused) {
  constexpr int kMessages = 40;
  StandInStreams::get().reset();
  CollectiveWorld world(2);
  std::size_t before = 0;
  const auto failures = world.try_each([&](CollectiveWorld::Rank self) {
    const Group group = make_group_of_row(self.runtime, self.membership, {.backend = BackendKind::kCudaIpc});
    const auto exchange = [&](int count) {
      const at::Tensor tensor = at::ones({3}).to(stand_in(0));
      for (int i = 0; i < count; ++i) {
        if (self.rank == 0) group.send(tensor, 1).wait();
        if (self.rank == 1) group.recv(tensor, 0).wait();
      }
      self.membership.barrier("test.exchange" + std::to_string(count), {},
                              world.executor().deadline_in(seconds(60)));
    };
    exchange(5);
    if (self.rank == 1) before = events_made();
    exchange(kMessages);
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << to_error(failure).what();
  EXPECT_LT(events_made() - before, kMessages / 2);
}

TEST(EventGates, TakeOneEventInTurnAndOneEachAtOnce) {
  const c10::Stream stream = device::current_stream(stand_in(0));
  const auto events = std::make_shared<device::EventPool>();
  const std::size_t before = events_made();
  for (int i = 0; i < 10; ++i) EventGate::record(stream, events)->pass();
  EXPECT_EQ(events_made() - before, 1U);
  const auto first = EventGate::record(stream, events), second = EventGate::record(stream, events);
  EXPECT_EQ(events_made() - before, 2U);
  EXPECT_TRUE(first->done());
  EXPECT_TRUE(second->done());
}

/// What the event of a gate is recorded for next must not change what earlier takers of the gate wait for.
TEST(EventGates, OrderTheirTakersAlsoWhenTheEventIsRecordedAgain) {
  StandInStreams::get().reset();
  const c10::Stream writes = device::stream_from_pool(stand_in(0)),
                    reads = device::stream_from_pool(stand_in(0)),
                    other = device::stream_from_pool(stand_in(0));
  const auto events = std::make_shared<device::EventPool>();
  at::Tensor values;
  {
    const c10::StreamGuard guard(writes);
    values = at::ones({4}).to(stand_in(0)) + 1;
  }
  {
    const c10::StreamGuard guard(reads);
    EventGate::record(writes, events, {values})->pass();
    EventGate::record(other, events)->pass();
    EXPECT_TRUE(at::equal((values + 1).cpu(), at::full({4}, 3.0F)));
  }
  values = at::Tensor();
  EXPECT_EQ(StandInStreams::get().take_races(), std::vector<std::string>());
}

TEST(EventGates, OutliveTheOwnerOfTheirEvents) {
  auto events = std::make_shared<device::EventPool>();
  std::shared_ptr<const ValueGate> gate =
      EventGate::record(device::current_stream(stand_in(0)), events, {at::ones({2}).to(stand_in(0))});
  events.reset();
  const std::shared_ptr<const ValueGate> renewed = gate->renew();
  gate.reset();
  renewed->pass();
  EXPECT_TRUE(renewed->done());
}

}  // namespace
}  // namespace torchspan::testing::collective_device_events
