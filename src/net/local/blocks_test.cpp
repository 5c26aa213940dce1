#include <algorithm>
#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <gtest/gtest.h>
#include <random>
#include <sys/mman.h>
#include <unistd.h>

#include <torchspan/detail/core/executor.h>

#include "net/local/block_pool.h"
#include "net/local/ring.h"
#include "tests/support/errors.h"

namespace torchspan::net::blocks_test {
namespace {

using torchspan::testing::kind_of;

constexpr std::size_t kSize = 100'000;

/// A sender's pool and its receiver's PeerBlocks, connected directly.
struct Lane : BlockNotes {
  explicit Lane(const LocalOptions& options, const TransportOptions& transport = {})
      : Lane(std::make_shared<LocalShare>(options), std::make_shared<LocalShare>(options), transport) {}
  Lane(std::shared_ptr<LocalShare> mine, std::shared_ptr<LocalShare> theirs,
       const TransportOptions& transport = {})
      : sender(std::move(mine)),
        receiver(std::move(theirs)),
        pool(std::make_shared<BlockPool>(sender, *this)),
        peer_blocks(std::make_unique<PeerBlocks>(receiver, transport)) {
    sender->add_pool(pool);
  }
  ~Lane() override { pool->close(); }

  bool pass(std::uint64_t block, std::size_t size, const Descriptor& descriptor) override {
    if (!listens) return false;
    peer_blocks->add(block, size, descriptor);
    if (on_pass) on_pass(size, descriptor);
    ++passed;
    return true;
  }
  bool retire(std::uint64_t block) override {
    peer_blocks->retire(block);
    ++retired;
    return true;
  }
  std::uint64_t lend(std::size_t size, std::uint8_t fill = 1) {
    const Bytes bytes(size, std::byte{fill});
    return pool->lend({bytes.data(), bytes.size(), nullptr});
  }

  std::shared_ptr<LocalShare> sender, receiver;
  bool listens = true;
  std::function<void(std::size_t, const Descriptor&)> on_pass;
  std::atomic<int> passed = 0, retired = 0;
  std::shared_ptr<BlockPool> pool;
  std::unique_ptr<PeerBlocks> peer_blocks;
};

bool is_filled(const Buffer& buffer, std::uint8_t fill) {
  return std::all_of(buffer.data, buffer.data + buffer.size,
                     [&](std::byte byte) { return byte == std::byte{fill}; });
}

TEST(Blocks, AreOwnedByTheReceiverAndReturnWhenItReleasesThem) {
  Lane lane({});
  const std::uint64_t first = lane.lend(kSize, 1);
  Buffer buffer = lane.peer_blocks->adopt(first, kSize);
  EXPECT_EQ(buffer.size, kSize);
  EXPECT_TRUE(is_filled(buffer, 1));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data) % 64, 0u);
  const std::uint64_t second = lane.lend(kSize, 2);
  EXPECT_NE(second, first) << "that one is still the receiver's";
  std::memset(buffer.data, 9, buffer.size);
  EXPECT_TRUE(is_filled(lane.peer_blocks->adopt(second, kSize), 2));
  buffer = {};
  for (std::uint8_t i = 3; i < 10; ++i) {
    const std::uint64_t again = lane.lend(kSize, i);
    EXPECT_TRUE(again == first || again == second);
    EXPECT_TRUE(is_filled(lane.peer_blocks->adopt(again, kSize), i));
  }
  EXPECT_EQ(lane.passed, 2);
  EXPECT_EQ(lane.sender->lent.value(), 9u);
  EXPECT_EQ(lane.receiver->adopted.value(), 9u);
}

TEST(Blocks, AreNeverWrittenToWhileTheyAreHeld) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  Lane lane({.pool_bytes = 8 << 20});
  std::vector<std::pair<Buffer, std::uint8_t>> held;
  for (int i = 0; i < 3000; ++i) {
    const std::size_t size = 16'000 + random() % 4 * 20'000;
    const auto fill = static_cast<std::uint8_t>(random());
    if (const std::uint64_t block = lane.lend(size, fill)) {
      if (random() % 5 == 0) {
        lane.peer_blocks->adopt(block, size);
      } else {
        held.emplace_back(lane.peer_blocks->adopt(block, size), fill);
      }
    }
    while (!held.empty() && (held.size() > 200 || random() % 2 == 0)) {
      std::swap(held[random() % held.size()], held.back());
      ASSERT_TRUE(is_filled(held.back().first, held.back().second));
      held.pop_back();
    }
  }
  for (const auto& [buffer, fill] : held) EXPECT_TRUE(is_filled(buffer, fill));
}

TEST(Blocks, AreReturnedIfTheyWereNotSent) {
  Lane lane({});
  const std::uint64_t block = lane.lend(kSize);
  lane.pool->take_back(block);
  EXPECT_EQ(lane.lend(kSize), block);
}

TEST(Blocks, RunOutAtTheCapAndAreAvailableAgainOnceReturned) {
  Lane lane(std::make_shared<LocalShare>(LocalOptions{.pool_bytes = 4 << 20}),
            std::make_shared<LocalShare>(LocalOptions{}));
  std::vector<Buffer> held;
  for (;;) {
    const std::uint64_t block = lane.lend(1 << 20);
    if (block == 0) break;
    held.push_back(lane.peer_blocks->adopt(block, 1 << 20));
    ASSERT_LE(held.size(), 4u);
  }
  EXPECT_LE(lane.sender->reserved, 4u << 20);
  EXPECT_EQ(lane.sender->inlined.value(), 1u);
  EXPECT_EQ(lane.lend(5 << 20), 0u) << "larger than the pool";
  held.clear();
  EXPECT_NE(lane.lend(1 << 20), 0u);
}

TEST(Blocks, OfOtherSizesAndOtherPeersAreFreedToMakeRoom) {
  const auto sender = std::make_shared<LocalShare>(LocalOptions{.pool_bytes = 4 << 20});
  const auto receiver = std::make_shared<LocalShare>(LocalOptions{});
  Lane one(sender, receiver), other(sender, receiver);
  one.peer_blocks->adopt(one.lend(3 << 20), 3 << 20);
  one.peer_blocks->adopt(one.lend(2 << 20), 2 << 20);
  EXPECT_EQ(one.retired, 1);
  const Buffer kept = one.peer_blocks->adopt(one.lend(1 << 20), 1 << 20);
  EXPECT_NE(other.lend(2 << 20), 0u);
  EXPECT_EQ(one.retired, 2) << "the block that is kept was not";
  EXPECT_TRUE(is_filled(kept, 1));
  EXPECT_EQ(other.lend(2 << 20), 0u) << "no peer has spare room";
}

TEST(Blocks, AreCopiedAndReturnedAtOnceAboveHalfOfTheCap) {
  Lane lane(std::make_shared<LocalShare>(LocalOptions{}),
            std::make_shared<LocalShare>(LocalOptions{.pool_bytes = 4 << 20}));
  std::vector<Buffer> held;
  for (std::uint8_t i = 0; i < 6; ++i) {
    held.push_back(lane.peer_blocks->adopt(lane.lend(900'000, i), 900'000));
  }
  EXPECT_EQ(lane.receiver->adopted.value(), 2u);
  EXPECT_EQ(lane.receiver->copied.value(), 4u);
  EXPECT_EQ(lane.passed, 3) << "the copied blocks were returned";
  for (std::uint8_t i = 0; i < 6; ++i) EXPECT_TRUE(is_filled(held[i], i));
  held.clear();
  EXPECT_EQ(lane.receiver->adopted_bytes, 0u);
  lane.peer_blocks->adopt(lane.lend(900'000), 900'000);
  EXPECT_EQ(lane.receiver->adopted.value(), 3u);
}

TEST(Blocks, AreCopiedIntoMemoryOfTheCallersAllocator) {
  TransportOptions transport;
  std::vector<std::size_t> asked;
  transport.allocator = [&](std::size_t size) {
    asked.push_back(size);
    return size > kSize ? Buffer() : allocate_buffer(size);
  };
  Lane lane({}, transport);
  EXPECT_TRUE(is_filled(lane.peer_blocks->adopt(lane.lend(kSize, 5), kSize), 5));
  EXPECT_EQ(asked, std::vector<std::size_t>{kSize});
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->adopt(lane.lend(kSize + 1), kSize + 1); }),
            ErrorKind::kOverloaded);
}

TEST(Blocks, OutliveTheirPoolAndTheReceiversMappings) {
  Buffer buffer;
  {
    Lane lane({});
    buffer = lane.peer_blocks->adopt(lane.lend(kSize, 7), kSize);
  }
  EXPECT_TRUE(is_filled(buffer, 7));
  std::memset(buffer.data, 1, buffer.size);
}

TEST(Blocks, AreNotLentOnceTheConnectionEnded) {
  Lane lane({});
  const std::uint64_t block = lane.lend(kSize);
  lane.peer_blocks->adopt(block, kSize);
  lane.pool->close();
  EXPECT_EQ(lane.lend(kSize), 0u);
  lane.pool->take_back(block);
}

TEST(Blocks, FallBackToBytesWhenTheSystemRefuses) {
  for (const LocalStep step : {LocalStep::kMakeMemory, LocalStep::kReserveMemory, LocalStep::kMapMemory}) {
    bool refuses = true;
    const LocalFaults faults = [&](LocalStep now) { return refuses && now == step; };
    Lane lane(std::make_shared<LocalShare>(LocalOptions{}, faults),
              std::make_shared<LocalShare>(LocalOptions{}, faults));
    EXPECT_EQ(lane.lend(kSize), 0u);
    EXPECT_EQ(lane.sender->reserved, 0u) << "nothing is left of it";
    refuses = false;
    EXPECT_NE(lane.lend(kSize), 0u);
  }
  Lane lane({});
  lane.listens = false;
  EXPECT_EQ(lane.lend(kSize), 0u);
  EXPECT_EQ(lane.sender->reserved, 0u);
}

TEST(Blocks, WasteLittleRoom) {
  for (std::size_t size = 1; size < (std::size_t{1} << 33); size += 1 + size / 7) {
    const std::size_t room = BlockPool::room_for(size);
    ASSERT_GE(room, size);
    ASSERT_LE(room, size + std::max<std::size_t>(16 << 10, size / 8)) << size;
  }
  EXPECT_EQ(BlockPool::room_for(64 << 20), 64u << 20);
}

TEST(Blocks, OfAHostileSenderAreRefused) {
  Lane lane({});
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->adopt(1, kSize); }), ErrorKind::kInvalid) << "never passed";
  const std::uint64_t block = lane.lend(kSize);
  const std::size_t room = BlockPool::room_for(kSize);
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->adopt(block, room + 1); }), ErrorKind::kInvalid)
      << "beyond its end";
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->adopt(block, SIZE_MAX); }), ErrorKind::kInvalid);
  {
    const Buffer held = lane.peer_blocks->adopt(block, room);
    EXPECT_EQ(kind_of([&] { lane.peer_blocks->adopt(block, kSize); }), ErrorKind::kInvalid) << "lent twice";
    EXPECT_EQ(kind_of([&] { lane.peer_blocks->retire(block); }), ErrorKind::kInvalid) << "held";
  }
  lane.peer_blocks->retire(block);
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->retire(block); }), ErrorKind::kInvalid) << "gone";
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->adopt(block, kSize); }), ErrorKind::kInvalid);
}

TEST(Blocks, StayWithTheThreadThatFillsThemWhateverTheReceiverSends) {
  const auto executor = make_executor();
  const Deadline deadline = executor->deadline_in(std::chrono::seconds(20));
  Lane lane({.pool_bytes = 1 << 20});
  std::vector<SharedMemory> mapped;
  Mutex mutex;
  lane.on_pass = [&](std::size_t size, const Descriptor& descriptor) {
    MutexLock lock(mutex);
    mapped.push_back(map_memory({}, descriptor, size));
  };
  std::atomic<int> running{2};
  std::vector<Thread> senders;
  for (const std::size_t size : {600'000, 900'000}) {
    senders.push_back(executor->spawn("sender", [&, size] {
      for (int i = 0; lane.retired < 20 && !deadline.passed(executor->now()); ++i) {
        if (const std::uint64_t block = lane.lend(size); block != 0 && i % 3 == 0)
          lane.pool->take_back(block);
      }
      --running;
    }));
  }
  while (running.load() != 0) {
    MutexLock lock(mutex);
    if (mapped.size() > 50) mapped.erase(mapped.begin(), mapped.end() - 50);
    for (const SharedMemory& memory : mapped) reinterpret_cast<BlockHeader*>(memory.data())->lent = 0;
  }
  senders.clear();
  EXPECT_GE(lane.retired, 20) << "they did not take each other's blocks away";
  EXPECT_LE(lane.sender->reserved, 1u << 20);
}

TEST(Blocks, OfMemoryThatCouldShrinkOrIsAnotherSizeAreRefused) {
  Lane lane({});
  const std::size_t size = 1 << 20;
  const Descriptor open(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(open.get(), size), 0);
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->add(1, size, open); }), ErrorKind::kInvalid) << "no seals";
  ASSERT_EQ(::fcntl(open.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SEAL), 0);
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->add(1, size, open); }), ErrorKind::kInvalid) << "can shrink";
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Descriptor pipe(ends[0]), other(ends[1]);
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->add(1, size, pipe); }), ErrorKind::kInvalid) << "no memory";

  const auto made = make_memory({}, size);
  for (const std::uint64_t invalid : {std::uint64_t{0}, std::uint64_t{4095}, std::uint64_t{size - 1},
                                      std::uint64_t{size + 4096}, UINT64_MAX}) {
    EXPECT_EQ(kind_of([&] { lane.peer_blocks->add(1, invalid, made->descriptor); }), ErrorKind::kInvalid)
        << invalid;
  }
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->add(0, size, made->descriptor); }), ErrorKind::kInvalid);
  lane.peer_blocks->add(1, size, made->descriptor);
  EXPECT_EQ(kind_of([&] { lane.peer_blocks->add(1, size, made->descriptor); }), ErrorKind::kInvalid)
      << "twice";
}

TEST(Blocks, OfASenderThatPassesTooManyAreRefused) {
  Lane lane({});
  const auto made = make_memory({}, kBlockHeaderBytes + 16);
  for (std::uint64_t i = 1; i <= kMostBlocks; ++i)
    lane.peer_blocks->add(i, kBlockHeaderBytes + 16, made->descriptor);
  EXPECT_EQ(
      kind_of([&] { lane.peer_blocks->add(kMostBlocks + 1, kBlockHeaderBytes + 16, made->descriptor); }),
      ErrorKind::kInvalid);
}

}  // namespace
}  // namespace torchspan::net::blocks_test
