#include <atomic>
#include <csignal>
#include <cstring>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include "tests/conformance/transport_node.h"

/// A transport copies the caller's bytes without a lock that other threads need.
namespace torchspan::net::conformance::transport_copies {
namespace {

constexpr std::size_t kTrapBytes = 1 << 20;
constexpr std::time_t kPatience = 20;  ///< seconds

/// Memory whose first reader pauses until proceed(), inside of the read: reading it raises SIGSEGV, whose handler waits.
class Trap {
 public:
  explicit Trap(std::uint64_t salt) {
    void* mapped =
        ::mmap(nullptr, 2 * kTrapBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bytes_ = static_cast<std::byte*>(mapped);
    const Bytes content = pattern(2 * kTrapBytes, salt);
    std::memcpy(bytes_, content.data(), content.size());
    set_.store(this);
    struct sigaction action {};
    action.sa_sigaction = hold_reader;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSEGV, &action, &before_);
    ::mprotect(bytes_, 2 * kTrapBytes, PROT_NONE);
  }
  ~Trap() {
    ::sigaction(SIGSEGV, &before_, nullptr);
    set_.store(nullptr);
    ::munmap(bytes_, 2 * kTrapBytes);
  }
  Trap(const Trap&) = delete;
  Trap& operator=(const Trap&) = delete;

  BytesView header() const { return {bytes_, kTrapBytes}; }
  Segment segment() const { return {bytes_ + kTrapBytes, kTrapBytes, nullptr}; }
  bool is_read() const { return is_read_.load(); }
  void proceed() { may_proceed_.store(true); }
  /// The reader waited in vain for proceed().
  bool gave_up() const { return gave_up_.load(); }

 private:
  static void hold_reader(int, siginfo_t*, void*) {
    Trap* const trap = set_.load();
    if (trap == nullptr) ::_exit(1);
    trap->is_read_.store(true);
    timespec start{}, now{};
    ::clock_gettime(CLOCK_MONOTONIC, &start);
    while (!trap->may_proceed_.load()) {
      ::clock_gettime(CLOCK_MONOTONIC, &now);
      if (now.tv_sec - start.tv_sec > kPatience) {
        trap->gave_up_.store(true);
        break;
      }
      ::sched_yield();
    }
    ::mprotect(trap->bytes_, 2 * kTrapBytes, PROT_READ | PROT_WRITE);
  }

  static inline std::atomic<Trap*> set_{nullptr};
  std::byte* bytes_ = nullptr;
  std::atomic<bool> is_read_{false};
  std::atomic<bool> may_proceed_{false};
  std::atomic<bool> gave_up_{false};
  struct sigaction before_ {};
};

TEST_P(TransportConformance, SendsForOtherThreadsWhileItCopiesALargeMessage) {
  if (GetParam().name.starts_with("Sim")) GTEST_SKIP() << "the simulated executor runs one thread at a time";
  in_world([](World& world) {
    Node listener(world, "listener");
    Node::Options not_driven;
    not_driven.drive = false;  // the channel stays unopened, so all messages are queued
    Node dialer(world, "dialer", not_driven);
    const auto channel = dialer.connect(listener.listen());
    Trap trap(7);
    Thread sender = world.executor().spawn("sender", [&] {
      const Segment segment = trap.segment();
      channel->send(trap.header(), std::span(&segment, 1));
    });
    while (!trap.is_read()) world.executor().yield();
    send(*channel, numbered(1));  // takes every lock of the channel
    EXPECT_FALSE(trap.gave_up()) << "the message is copied while its thread holds a lock of the channel";
    trap.proceed();
    sender.join();
    dialer.drive();
    listener.wait_for_messages(2);
    const std::vector<Parcel> parcels = listener.journal().parcels();
    ASSERT_EQ(parcels.size(), 2u);
    const std::size_t large =
        parcels[0].segments.empty() || parcels[0].segments[0].size() < kTrapBytes ? 1 : 0;
    EXPECT_EQ(number_of(parcels[1 - large]), 1u);
    const Bytes content = pattern(2 * kTrapBytes, 7);
    ASSERT_EQ(parcels[large].segments.size(), 1u);
    EXPECT_TRUE(parcels[large].header == Bytes(content.begin(), content.begin() + kTrapBytes));
    EXPECT_TRUE(parcels[large].segments[0] == Bytes(content.begin() + kTrapBytes, content.end()));
  });
}

TEST_P(TransportConformance, EndsAChannelWhileAMessageIsCopied) {
  if (GetParam().name.starts_with("Sim")) GTEST_SKIP() << "the simulated executor runs one thread at a time";
  in_world([](World& world) {
    Node listener(world, "listener");
    Node::Options not_driven;
    not_driven.drive = false;
    Node dialer(world, "dialer", not_driven);
    const auto channel = dialer.connect(listener.listen());
    Trap trap(8);
    Thread sender = world.executor().spawn("sender", [&] {
      const Segment segment = trap.segment();
      try {
        channel->send(trap.header(), std::span(&segment, 1));
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
      }
    });
    while (!trap.is_read()) world.executor().yield();
    dialer.stop();
    trap.proceed();
    sender.join();
    EXPECT_FALSE(trap.gave_up());
    EXPECT_EQ(channel->unsent_bytes(), 0u);
  });
}

}  // namespace
}  // namespace torchspan::net::conformance::transport_copies
