#include "net/local/ring.h"

#include <algorithm>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <new>
#include <random>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <torchspan/detail/core/executor.h>

#include "tests/support/errors.h"

namespace torchspan::net::ring_test {
namespace {

using torchspan::testing::kind_of;

constexpr std::size_t kCapacity = 4096;
constexpr Duration kPatience = std::chrono::seconds(30);

/// Both ends of a ring, each with a separate mapping, as in two processes.
struct Ring {
  Ring() : Ring(*make_memory({}, kRingHeaderBytes + kCapacity)) {}
  explicit Ring(NewMemory made)
      : producer(init(std::move(made.memory))),
        consumer(map_memory({}, made.descriptor, kRingHeaderBytes + kCapacity)) {}

  static SharedMemory init(SharedMemory memory) {
    new (memory.data()) RingHeader{};
    return memory;
  }
  std::size_t write(const Bytes& bytes) {
    const iovec place{const_cast<std::byte*>(bytes.data()), bytes.size()};
    return producer.write({&place, 1});
  }

  RingProducer producer;
  RingConsumer consumer;
};

/// Byte `index` of an endless known text.
std::byte text_at(std::uint64_t index) {
  return std::byte(static_cast<std::uint8_t>(index * 7 + (index >> 8)));
}

Bytes text(std::uint64_t from, std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = text_at(from + i);
  return bytes;
}

bool is_text(BytesView bytes, std::uint64_t from) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != text_at(from + i)) return false;
  }
  return true;
}

/// Continues the text at `sent` with up to three pieces of random sizes.
std::size_t write_text(RingProducer& producer, std::uint64_t sent, std::mt19937& random) {
  std::array<Bytes, 3> pieces;
  std::array<iovec, 3> places;
  std::uint64_t at = sent;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = text(at, random() % 4 == 0 ? 0 : random() % 3000);
    places[i] = {pieces[i].data(), pieces[i].size()};
    at += pieces[i].size();
  }
  return producer.write(places);
}

// A child of fork() once had the rings of its parent.
TEST(Ring, IsNotInheritedByForkedChildren) {
  const Ring ring;
  for (RingHeader* header : {&ring.producer.header(), &ring.consumer.header()}) {
    const pid_t child = ::fork();
    if (child == 0)
      ::_exit(::msync(header, kRingHeaderBytes, MS_ASYNC) == 0 ? 1 : 0);  // ENOMEM: it is not mapped
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

TEST(Ring, ReadsWhatWasWrittenAcrossTheWrap) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  Ring ring;
  std::uint64_t sent = 0, read = 0;
  while (read < 3'000'000) {
    if (random() % 2 == 0) sent += write_text(ring.producer, sent, random);
    ASSERT_LE(sent - read, kCapacity);
    const BytesView bytes = ring.consumer.readable();
    ASSERT_EQ(bytes.empty(), sent == read);
    ASSERT_TRUE(is_text(bytes, read));
    const std::size_t taken = bytes.empty() ? 0 : random() % (bytes.size() + 1);
    ring.consumer.consume(taken);
    read += taken;
  }
}

TEST(Ring, TakesNoMoreThanItHolds) {
  Ring ring;
  EXPECT_EQ(ring.write(text(0, kCapacity + 100)), kCapacity);
  EXPECT_EQ(ring.write(text(0, 1)), 0u);
  EXPECT_TRUE(ring.producer.ask_for_room());
  EXPECT_TRUE(ring.consumer.consume(10)) << "the producer waits for room";
  EXPECT_FALSE(ring.consumer.consume(10)) << "it was already notified";
  EXPECT_FALSE(ring.producer.ask_for_room()) << "there is room";
  EXPECT_EQ(ring.write(text(kCapacity, 100)), 20u);
}

TEST(Ring, WakesOnlyASleepingConsumer) {
  Ring ring;
  ring.write(text(0, 1));
  EXPECT_FALSE(ring.producer.consumer_wants_wake());
  EXPECT_FALSE(ring.consumer.ask_for_bytes()) << "there is one";
  ring.consumer.consume(1);
  EXPECT_TRUE(ring.consumer.ask_for_bytes());
  EXPECT_TRUE(ring.producer.consumer_wants_wake());
  EXPECT_FALSE(ring.producer.consumer_wants_wake()) << "it was already notified";
}

TEST(Ring, LosesNoByteAndNoWakeBetweenTwoThreadsThatSleep) {
  constexpr std::uint64_t kAll = 5'000'000;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  const auto executor = make_executor();
  const auto reader = executor->make_parker(), writer = executor->make_parker();
  const Deadline deadline = executor->deadline_in(kPatience);
  Ring ring;
  Thread other = executor->spawn("producer", [&] {
    std::mt19937 random(seed);
    for (std::uint64_t sent = 0; sent < kAll;) {
      const std::size_t written = write_text(ring.producer, sent, random);
      sent += written;
      if (written != 0 && ring.producer.consumer_wants_wake()) reader->unpark();
      if (ring.producer.ask_for_room() && !writer->park(deadline)) return;
    }
  });
  std::uint64_t read = 0;
  while (read < kAll) {
    const BytesView bytes = ring.consumer.readable();
    if (bytes.empty()) {
      if (!ring.consumer.ask_for_bytes()) continue;
      if (!reader->park(deadline)) break;
      continue;
    }
    if (!is_text(bytes, read)) break;
    read += bytes.size();
    if (ring.consumer.consume(bytes.size())) writer->unpark();
  }
  EXPECT_GE(read, kAll);
  writer->unpark();
  other.join();
}

TEST(Ring, RejectsCountersBeyondItsSize) {
  for (const std::uint64_t invalid : {std::uint64_t{kCapacity + 11}, std::uint64_t{9}, std::uint64_t{1} << 63,
                                      std::numeric_limits<std::uint64_t>::max()}) {
    Ring ring;
    ring.write(text(0, 10));
    ring.consumer.consume(10);
    ring.consumer.header().tail = invalid;
    EXPECT_EQ(kind_of([&] { ring.consumer.readable(); }), ErrorKind::kInvalid) << invalid;
    EXPECT_FALSE(ring.consumer.ask_for_bytes()) << "a thread that sleeps now will not see it";
  }
  for (const std::uint64_t invalid :
       {std::uint64_t{11}, std::uint64_t{1} << 63, std::uint64_t{0} - kCapacity}) {
    Ring ring;
    ring.write(text(0, 10));
    ring.producer.header().head = invalid;
    EXPECT_EQ(kind_of([&] { ring.write(text(0, kCapacity)); }), ErrorKind::kInvalid) << invalid;
    EXPECT_FALSE(ring.producer.ask_for_room()) << "a thread that sleeps now will not see it";
  }
}

TEST(Ring, StaysInItsMemoryWhateverThePeerWritesIntoTheHeader) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  Ring ring;
  for (int i = 0; i < 20'000; ++i) {
    RingHeader& header = ring.producer.header();
    if (random() % 3 == 0) header.tail += random() % 3 == 0 ? random() : random() % kCapacity;
    if (random() % 3 == 0) header.head += random() % 3 == 0 ? random() : random() % kCapacity;
    try {
      const BytesView bytes = ring.consumer.readable();
      ASSERT_LE(bytes.size(), kCapacity);
      std::uint64_t sum = 0;
      for (const std::byte byte : bytes) sum += static_cast<std::uint8_t>(byte);
      ASSERT_LE(sum, bytes.size() * 255);
      ring.consumer.consume(bytes.size());
      ASSERT_LE(ring.write(text(0, random() % (2 * kCapacity))), kCapacity);
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kInvalid);
    }
  }
}

TEST(Ring, HasASizeThatIsAPowerOfTwo) {
  for (const std::uint64_t size : {0ull, 1ull, 2048ull, 4097ull, 1ull << 31, 1ull << 63}) {
    EXPECT_FALSE(is_ring_size(size)) << size;
  }
  for (const std::uint64_t size : {4096ull, 1ull << 20, 1ull << 30}) EXPECT_TRUE(is_ring_size(size)) << size;
}

}  // namespace
}  // namespace torchspan::net::ring_test
