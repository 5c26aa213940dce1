#include <sys/resource.h>

#include "net/local/local_test_tools.h"

/// What only shared memory has: refusals of the system, lent blocks, sleep. Everything else is in
/// tests/conformance.
namespace torchspan::net::local_test::local_transport_test {
namespace {

using ::testing::HasSubstr;

TEST_F(LocalTransportTest, RejectsInvalidRingSizes) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{100'000}, std::size_t{1} << 40}) {
    try {
      start({.ring_bytes = size});
      ADD_FAILURE() << size;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.message(), HasSubstr("LocalOptions::ring_bytes"));
    }
  }
}

TEST_F(LocalTransportTest, LendsLargeSegmentsAndCarriesSmallOnesInTheRing) {
  start();
  join();
  expect_traffic();
  send(*channel_, 1000, 1);
  drive_until([&] { return listener_->journal.received.size() == 6; });
  EXPECT_EQ(dialer_->count("lent"), 5u);
  EXPECT_EQ(dialer_->count("adopted"), 5u);
  EXPECT_EQ(listener_->count("adopted"), 5u);
  EXPECT_EQ(listener_->count("copied") + listener_->count("inlined"), 0u);
  EXPECT_EQ(dialer_->count("inlined"), 0u);
}

TEST_F(LocalTransportTest, ReusesBlocksThatTheReceiverReleased) {
  start();
  join();
  for (int i = 0; i < 50; ++i) {
    send(*channel_, 1 << 20, static_cast<std::uint8_t>(i));
    drive_until([&] { return !listener_->journal.received.empty(); });
    EXPECT_TRUE(
        is_filled(listener_->journal.received.at(0).segments.at(0), 1 << 20, static_cast<std::uint8_t>(i)));
    listener_->journal.received.clear();
  }
  EXPECT_LE(dialer_->count("pool_bytes"), 3u << 20);
}

TEST_F(LocalTransportTest, FreesIdleBlocksButNoneInUse) {
  start({.idle_after = std::chrono::milliseconds(20)});
  join();
  for (std::uint8_t i = 0; i < 3; ++i) send(*channel_, 1 << 20, i);
  drive_until([&] { return listener_->journal.received.size() == 3; });
  const std::uint64_t all = dialer_->count("pool_bytes");
  EXPECT_GE(all, 3u << 20);
  const Message kept = std::move(listener_->journal.received.at(1));
  listener_->journal.received.clear();
  const auto rest = [&] { dialer_->transport->wait(executor_->deadline_in(std::chrono::milliseconds(25))); };
  drive_until([&] {
    rest();
    return dialer_->count("pool_bytes") <= all / 3;
  });
  for (int rounds = 0; rounds < 5; ++rounds) rest();
  EXPECT_EQ(dialer_->count("pool_bytes"), all / 3);
  EXPECT_TRUE(is_filled(kept.segments.at(0), 1 << 20, 1));
  send(*channel_, 1 << 20, 4);
  drive_until([&] { return listener_->journal.received.size() == 1; });
  EXPECT_TRUE(is_filled(listener_->journal.received.at(0).segments.at(0), 1 << 20, 4));
}

TEST_F(LocalTransportTest, KeepsAdoptedMemoryAfterBothSidesEnd) {
  start();
  join();
  send(*channel_, 300'000, 7);
  drive_until([&] { return !listener_->journal.received.empty(); });
  const Buffer buffer = listener_->journal.received.at(0).segments.at(0);
  channel_.reset();
  back_.reset();
  dialer_.reset();
  listener_.reset();
  EXPECT_TRUE(is_filled(buffer, 300'000, 7));
  std::memset(buffer.data, 1, buffer.size);
}

TEST_F(LocalTransportTest, SendsBytesWhenThePoolIsFullAndLendsAgainLater) {
  start({.pool_bytes = 1 << 20});
  join();
  for (std::uint8_t i = 0; i < 8; ++i) {
    send(*channel_, 300'000, i);
    drive_until([&] { return listener_->journal.received.size() == i + 1u; });
  }
  for (std::uint8_t i = 0; i < 8; ++i) {
    EXPECT_TRUE(is_filled(listener_->journal.received.at(i).segments.at(0), 300'000, i));
  }
  EXPECT_EQ(dialer_->count("lent"), 3u);
  EXPECT_EQ(dialer_->count("inlined"), 5u);
  listener_->journal.received.clear();
  send(*channel_, 300'000, 9);
  EXPECT_EQ(dialer_->count("lent"), 4u);
}

TEST_F(LocalTransportTest, UsesTheSocketWhenEitherSideCannotShareMemory) {
  for (const LocalStep step : {LocalStep::kMakeMemory, LocalStep::kReserveMemory, LocalStep::kMapMemory,
                               LocalStep::kPassDescriptor, LocalStep::kTakeDescriptor}) {
    for (const bool dials : {false, true}) {
      SCOPED_TRACE(::testing::Message()
                   << "step " << static_cast<int>(step) << (dials ? ", dialer" : ", listener"));
      const LocalFaults faults = [step](LocalStep now) { return now == step; };
      dialer_.reset();
      listener_.reset();
      dialer_faults_ = dials ? faults : nullptr;
      listener_faults_ = dials ? nullptr : faults;
      start();
      join();
      expect_traffic();
      EXPECT_EQ(dialer_->count("lent") + listener_->count("lent"), 0u);
      channel_->close();
      drive_until([&] { return !listener_->journal.closed.empty() && !dialer_->journal.closed.empty(); });
      EXPECT_THAT(listener_->journal.closed.at(0).message(), HasSubstr("closed the channel"));
    }
  }
}

TEST_F(LocalTransportTest, SendsBytesWhenTheSystemHasNoMemory) {
  for (const LocalStep step : {LocalStep::kMakeMemory, LocalStep::kReserveMemory, LocalStep::kMapMemory,
                               LocalStep::kPassDescriptor}) {
    SCOPED_TRACE(::testing::Message() << "step " << static_cast<int>(step));
    bool refuses = false;
    dialer_.reset();
    listener_.reset();
    dialer_faults_ = [&](LocalStep now) { return refuses && now == step; };
    start();
    join();
    refuses = true;
    for (std::uint8_t i = 0; i < 5; ++i) {
      send(*channel_, 300'000, i);
      drive_until([&] { return listener_->journal.received.size() == i + 1u; });
      EXPECT_TRUE(is_filled(listener_->journal.received.back().segments.at(0), 300'000, i));
    }
    EXPECT_EQ(dialer_->count("inlined"), 5u);
    EXPECT_EQ(dialer_->count("pool_bytes"), 0u);
  }
}

TEST_F(LocalTransportTest, AdvisesWhenNoDescriptorIsLeftForABlock) {
  bool refuses = false;
  listener_faults_ = [&](LocalStep now) { return refuses && now == LocalStep::kTakeDescriptor; };
  start();
  join();
  refuses = true;
  send(*channel_, 300'000, 1);
  drive_until([&] { return !listener_->journal.closed.empty() && !dialer_->journal.closed.empty(); });
  EXPECT_EQ(listener_->journal.closed.at(0).kind(), ErrorKind::kOverloaded);
  EXPECT_THAT(listener_->journal.closed.at(0).message(), HasSubstr("ulimit -n"));
  EXPECT_EQ(dialer_->journal.closed.at(0).kind(), ErrorKind::kDisconnected);
}

TEST_F(LocalTransportTest, KeepsWorkingWhenTheProcessRunsOutOfDescriptors) {
  start();
  join();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next_free = ::dup(0);
  ::close(next_free);
  const rlimit tight{static_cast<rlim_t>(next_free), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  send(*channel_, 300'000, 1);
  drive_until([&] { return listener_->journal.received.size() == 1; });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(dialer_->count("inlined"), 1u);
  expect_traffic();
  EXPECT_EQ(dialer_->count("lent"), 5u);
}

TEST_F(LocalTransportTest, KeepsNoDescriptorOfABlock) {
  start();
  join();
  const auto open_files = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = open_files();
  expect_traffic();
  EXPECT_GE(dialer_->count("lent"), 5u);
  EXPECT_EQ(open_files(), before);
}

TEST_F(LocalTransportTest, SleepsWhenNothingHappensAndWakesWhenSomethingDoes) {
  start();
  join();
  expect_traffic();
  const auto idle_waits = [&] {
    int waits = 0;
    const Deadline deadline = executor_->deadline_in(std::chrono::milliseconds(50));
    for (; !deadline.passed(executor_->now()); ++waits) {
      EXPECT_LT(waits, 10) << "it spins";
      listener_->transport->wait(deadline);
      listener_->transport->poll();
      if (waits >= 10) break;
    }
    return waits;
  };
  EXPECT_LT(idle_waits(), 10);
  const std::size_t known = listener_->journal.received.size();
  for (int round = 0; round < 200; ++round) {
    Thread sender = executor_->spawn("sender", [&] { send(*channel_, 10, 1); });
    const Deadline deadline = executor_->deadline_in(kPatience);
    while (listener_->journal.received.size() == known + static_cast<std::size_t>(round)) {
      ASSERT_FALSE(deadline.passed(executor_->now())) << "slept through a message";
      if (!listener_->transport->poll()) listener_->transport->wait(deadline);
    }
  }
}

}  // namespace
}  // namespace torchspan::net::local_test::local_transport_test
