#include "net/receive_buffers.h"

#include <atomic>
#include <cstring>
#include <gtest/gtest.h>
#include <random>
#include <set>
#include <vector>

#include <torchspan/detail/core/executor.h>

namespace torchspan::net::receive_buffers_test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(ReceiveBuffers, ReusesMemoryOnceItIsFree) {
  const ReceiveBuffers buffers;
  Buffer first = buffers(4 * kMiB);
  std::byte* const memory = first.data;
  const Buffer meanwhile = buffers(4 * kMiB);
  EXPECT_NE(meanwhile.data, memory);
  first = {};
  EXPECT_EQ(buffers.kept_bytes(), 4 * kMiB);
  const Buffer again = buffers(4 * kMiB - 5);
  EXPECT_EQ(again.data, memory);
  EXPECT_EQ(again.size, 4 * kMiB - 5);
  EXPECT_EQ(buffers.kept_bytes(), 0u);
}

TEST(ReceiveBuffers, WastesNoMoreThanAQuarter) {
  const ReceiveBuffers buffers;
  std::byte* const memory = buffers(8 * kMiB).data;
  EXPECT_NE(buffers(6 * kMiB - 1).data, memory);
  EXPECT_EQ(buffers(7 * kMiB).data, memory);
}

TEST(ReceiveBuffers, LeavesSmallSegmentsAlone) {
  const ReceiveBuffers buffers;
  EXPECT_EQ(buffers(0).owner, nullptr);
  EXPECT_NE(buffers(kMiB - 1).data, nullptr);
  EXPECT_EQ(buffers.kept_bytes(), 0u);
  EXPECT_TRUE(buffers.tidy(TimePoint()).is_never());
}

TEST(ReceiveBuffers, KeepsNoMoreThanTheLimit) {
  const ReceiveBuffers buffers({.keep = 5 * kMiB});
  std::vector<Buffer> out;
  for (int i = 0; i < 4; ++i) out.push_back(buffers(2 * kMiB));
  out.clear();
  EXPECT_EQ(buffers.kept_bytes(), 4 * kMiB);
  buffers(6 * kMiB);
  EXPECT_EQ(buffers.kept_bytes(), 4 * kMiB);
}

TEST(ReceiveBuffers, FreesMemoryThatStaysUnused) {
  const ReceiveBuffers buffers({.idle = std::chrono::seconds(1)});
  const TimePoint start{};
  Buffer busy = buffers(2 * kMiB);
  buffers(4 * kMiB);
  EXPECT_EQ(buffers.tidy(start).at(), start + std::chrono::seconds(1))
      << "memory that was returned earlier stays";
  EXPECT_EQ(buffers.kept_bytes(), 4 * kMiB);
  buffers.tidy(start + std::chrono::milliseconds(999));
  EXPECT_EQ(buffers.kept_bytes(), 4 * kMiB);
  busy = {};
  buffers.tidy(start + std::chrono::seconds(1));
  EXPECT_EQ(buffers.kept_bytes(), 2 * kMiB) << "memory that was returned meanwhile stays for another round";
  EXPECT_TRUE(buffers.tidy(start + std::chrono::seconds(2)).is_never());
  EXPECT_EQ(buffers.kept_bytes(), 0u);
}

TEST(ReceiveBuffers, KeepsItsMemoryValidAfterDestruction) {
  Buffer left;
  {
    const ReceiveBuffers buffers;
    left = buffers(kMiB);
  }
  std::memset(left.data, 7, left.size);
  EXPECT_EQ(left.data[left.size - 1], std::byte{7});
}

TEST(ReceiveBuffers, ReplacesOnlyTheDefaultAllocator) {
  TransportOptions own;
  own.allocator = [](std::size_t size) { return allocate_buffer(size); };
  EXPECT_EQ(ReceiveBuffers::of(with_receive_buffers(own)), nullptr);
  EXPECT_TRUE(has_own_allocator(own));
  const TransportOptions served = with_receive_buffers({});
  ASSERT_NE(ReceiveBuffers::of(served), nullptr);
  EXPECT_FALSE(has_own_allocator(served));
  served.allocator(kMiB);
  const TransportOptions twice = with_receive_buffers(served);
  EXPECT_EQ(ReceiveBuffers::of(twice)->kept_bytes(), kMiB) << "copies share what is kept";
}

TEST(ReceiveBuffers, NeverHandsOutTheSameMemoryTwice) {
  constexpr std::size_t kStep = 4096;
  const auto executor = make_executor();
  const ReceiveBuffers buffers({.keep = 64 * kMiB});
  std::atomic<int> damaged{0}, checked{0};
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::vector<Thread> threads;
  for (unsigned mark = 1; mark <= 3; ++mark) {
    threads.push_back(executor->spawn("user", [&, mark] {
      std::mt19937 random(seed + mark);
      std::vector<Buffer> held;
      for (int turn = 0; turn < 70; ++turn) {
        Buffer buffer = buffers(kMiB + random() % (kMiB / 2));
        for (std::size_t i = 0; i < buffer.size; i += kStep) buffer.data[i] = std::byte(mark);
        held.push_back(std::move(buffer));
        if (held.size() < 4) continue;
        const std::size_t chosen = random() % held.size();
        for (std::size_t i = 0; i < held[chosen].size; i += kStep) {
          damaged.fetch_add(held[chosen].data[i] == std::byte(mark) ? 0 : 1);
          checked.fetch_add(1);
        }
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(chosen));
        if (turn % 64 == 0) buffers.tidy(TimePoint(std::chrono::seconds(turn)));
      }
    }));
  }
  for (Thread& thread : threads) thread.join();
  EXPECT_EQ(damaged.load(), 0);
  EXPECT_GT(checked.load(), 0);
}

}  // namespace
}  // namespace torchspan::net::receive_buffers_test
